"""The conversation about usage: cumulative checkpoints per attempt from workers, outcomes from routers; keys are (request_id, attempt).

One message carries a batch: a list of what was noted since the last one, so that a busy service pays for few acknowledgements.
"""

import msgspec

from shared.contracts.subjects import ROOT, token

USAGE_STREAM = "TENANTRY_USAGE"
USAGE_SUBJECTS = (f"{ROOT}.usage.worker.*", f"{ROOT}.usage.router.*")


def worker_usage_subject(worker_id: str) -> str:
    return f"{ROOT}.usage.worker.{token(worker_id)}"


def router_usage_subject(router_id: str) -> str:
    return f"{ROOT}.usage.router.{token(router_id)}"


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


class RequestOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """The router's view at the end of a request."""

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


Usage = AttemptUsage | RequestOutcome

BATCH_LIMIT = 256  # of one message: about 100 KB

encode = msgspec.msgpack.Encoder().encode  # of a list of Usage
decode = msgspec.msgpack.Decoder(list[Usage]).decode
