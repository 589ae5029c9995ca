"""What a measured row is named by: the shape, and the routing where it is not even."""

from dataclasses import asdict, dataclass

Row = dict[str, str | int | float | None]
ROUTINGS = ("uniform", "zipf", "one_adapter", "hot_cell")
"""zipf: experts and adapters with odds 1, 1/2, 1/3, ... one_adapter: of all the slots one is used. hot_cell: that, and expert 0 is
among every token's choices, so one (adapter, expert) cell has as many pairs as there are tokens."""
DEFAULTS = {"layer": "", "routing": "uniform"}
"""Left out of a row where they hold."""


@dataclass(frozen=True, kw_only=True, order=True)
class Key:
    """op: moe_lora (decode: w13 + w2), moe_lora_prefill, dense_lora, work_list. layer: of dense ones (qkv, o_proj, gate_up, down)."""

    op: str
    model: str
    layer: str = ""
    tokens: int
    adapters: int
    rank: int
    routing: str = "uniform"


def key_of(row: Row) -> Key:
    return Key(**{name: row[name] for name in Key.__dataclass_fields__ if name in row})


def row_of(key: Key, *, us: float, vllm_us: float | None, floor_us: float) -> Row:
    shape = {name: value for name, value in asdict(key).items() if DEFAULTS.get(name) != value}
    theirs = None if vllm_us is None else round(vllm_us, 2)
    return {**shape, "us": round(us, 2), "vllm_us": theirs, "floor_us": round(floor_us, 2)}
