"""The conversation about usage: cumulative checkpoints per attempt and per engine from workers, outcomes from routers, residency from
registries.

Keys are (request_id, attempt) of attempts, request_id of outcomes, (worker_id, incarnation) of engines, (pool_id, adapter_id, since_ms)
of residency. One message carries a batch: a list of what was noted since the last one, so that a busy service pays for few
acknowledgements. Amounts that are billed are integers: their sums are exact. docs/usage.md says how they become a bill.
"""

import msgspec

from shared.contracts.subjects import ROOT, token

USAGE_STREAM = "TENANTRY_USAGE"
USAGE_SUBJECTS = (f"{ROOT}.usage.worker.*", f"{ROOT}.usage.router.*", f"{ROOT}.usage.registry.*")
SNAPSHOTS_BUCKET = "tenantry_usage"  # object store: closed days, and where the stream goes on after them


def worker_usage_subject(worker_id: str) -> str:
    return f"{ROOT}.usage.worker.{token(worker_id)}"


def router_usage_subject(router_id: str) -> str:
    return f"{ROOT}.usage.router.{token(router_id)}"


def registry_usage_subject(registry_id: str) -> str:
    return f"{ROOT}.usage.registry.{token(registry_id)}"


class AttemptUsage(msgspec.Struct, frozen=True, kw_only=True, tag="attempt"):
    """Cumulative: the highest `checkpoint` of a key counts, whatever the order of arrival."""

    request_id: str
    attempt: int
    checkpoint: int
    final: bool
    tenant_id: str
    adapter_id: str
    digest: str
    pool_id: str
    worker_id: str
    incarnation: str
    path: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    engine_ms: float = 0.0
    outcome: str = "running"  # running | complete | error:<code> | cancelled:<reason>
    alias: str = ""  # the tenant's name of the adapter; empty: the base itself
    version: int = 0
    base: str = ""  # full base identity
    key_id: str = ""  # the API key that asked
    queue_ms: float = 0.0  # waited in the tenant's own queue
    first_token_ms: float = 0.0  # from the attempt's arrival at the worker; 0: there was none
    total_ms: float = 0.0  # from the attempt's arrival at the worker until now or its end
    kv_byte_ms: int = 0  # bytes of KV cache reserved for it times the milliseconds for which they were
    gpu_us: int = 0  # its part of the engine's steps, by the pool's cost model
    tenant: str = ""  # the tenant's name then


class RequestOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """The router's view at the end of a request.

    A refusal is an outcome too, with `attempts` 0 where no worker was asked; without a handle where none was resolved. What
    has no tenant (no key, or not a valid one) has no outcome.
    """

    request_id: str
    attempts: int
    tenant_id: str
    adapter_id: str
    digest: str
    pool_id: str
    router_id: str
    path: str
    status: int
    outcome: str  # complete | error:<code> | client_gone
    delivered_bytes: int
    delivered_events: int  # body pieces that were handed to the client's connection
    client_label: str = ""
    alias: str = ""
    version: int = 0
    base: str = ""
    key_id: str = ""
    first_byte_ms: float = 0.0  # from the request's head; 0: nothing was sent
    total_ms: float = 0.0
    tenant: str = ""


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a step's parts weigh against each other when its time is split; microseconds each, as fitted for one pool's engine."""

    prefill_token_us: float
    decode_row_us: float
    context_mib_us: float  # KV cache read by attention
    adapter_mib_us: float  # one adapter's weights read, shared by its rows of the step
    fitted_steps: int = 0  # 0: the defaults, not fitted yet


class EngineTime(msgspec.Struct, frozen=True, kw_only=True, tag="engine"):
    """Where the wall time of one engine went since its incarnation started. Cumulative: the highest `checkpoint` counts.

    wall_us = busy_us + idle_us + sum(overhead_us) + unaccounted_us: idle and overhead are measured, only the last is a remainder.
    """

    worker_id: str
    incarnation: str
    pool_id: str
    checkpoint: int
    wall_us: int
    busy_us: int  # steps that computed for requests
    idle_us: int  # intervals in which nothing was scheduled
    unaccounted_us: int
    overhead_us: dict[str, int] = {}  # by the span's name
    billed_us: int = 0  # of busy_us, what attempts were charged
    steps: int = 0
    cost_model: CostModel | None = None


class Residency(msgspec.Struct, frozen=True, kw_only=True, tag="residency"):
    """VRAM that the ledger charged a mount with, from `since_ms` on. Cumulative: the highest `until_ms` counts.

    Both are the bus server's stamps of the pool's entry (milliseconds since 1970), so no registry's clock matters.
    """

    pool_id: str
    adapter_id: str
    since_ms: int
    until_ms: int
    final: bool
    bytes: int
    tenant_id: str
    tenant: str
    worker_id: str
    alias: str
    version: int
    digest: str
    base: str


class EngineEnded(msgspec.Struct, frozen=True, kw_only=True, tag="engine_ended"):
    """An incarnation is gone: its attempts that stand open at this point of the stream end here, billed from their last checkpoint.

    With `before_ms` the engine lives on, and only attempts end whose last checkpoint was stored before that (their last word was lost).
    """

    worker_id: str
    incarnation: str
    reason: str = ""
    before_ms: int = 0


Usage = AttemptUsage | RequestOutcome | EngineTime | Residency | EngineEnded

BATCH_LIMIT = 256  # of one message: about 100 KB

encode = msgspec.msgpack.Encoder().encode  # of a list of Usage
decode = msgspec.msgpack.Decoder(list[Usage]).decode
decode_batch = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode  # for who goes on where one record cannot be read
decode_one = msgspec.msgpack.Decoder(Usage).decode
