"""Which of an expert layer's two ways serves a batch: `moe_lora_` around the base's own activation and sum, or `moe_prefill`."""

from typing import Literal

from lora_kernels.configs.plans import LayerShape
from lora_kernels.moe_prefill.weights import MAX_RANK

PREFILL_FROM_PAIRS_A_CELL = 4
"""(token, expert) pairs for each (adapter, expert) cell a batch may hold."""

PREFILL_FROM_TOKENS = 257


def choose_path(shape: LayerShape) -> Literal["decode", "prefill"]:
    """The faster of the two for num_tokens tokens of at most num_adapters adapters; known on the host, without a look at the ids."""
    if shape.rank > MAX_RANK or shape.num_tokens < PREFILL_FROM_TOKENS:
        return "decode"
    pairs = shape.num_tokens * shape.top_k
    cells = shape.num_adapters * shape.num_experts
    return "prefill" if pairs >= PREFILL_FROM_PAIRS_A_CELL * cells else "decode"
