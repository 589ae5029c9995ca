"""The conversation of one request: router -> worker (InferRequest, control), worker -> router (frames).

An attempt is (request_id, attempt). The worker answers every attempt it reads with ACCEPTED or BOUNCED, then HEAD, BODY...,
and exactly one of END or ERROR. `seq` counts the frames of an attempt from 0 (ACCEPTED or BOUNCED); PROGRESS repeats the
highest seq sent so far, so that a lost tail shows. A gap is an error or a resend, never an end.
"""

from enum import IntEnum

import msgspec

from shared.contracts.errors import ErrorInfo
from shared.contracts.subjects import ROOT, token


def infer_subject(adapter_id: str, worker_id: str) -> str:
    """Where a worker hears requests for one adapter (for base traffic: the base's subject id, `base_subject_id`)."""
    return f"{ROOT}.infer.{token(adapter_id)}.{token(worker_id)}"


def base_subject_id(base_identity: str) -> str:
    """A base's token in subjects: its digest's first 32 hex digits."""
    return "base_" + base_identity.rsplit("@", 1)[-1][:32]


def answer_subject(router_id: str) -> str:
    """A router's own inbox for frames. Workers learn it from `InferRequest.router_id`, never from a free-form reply."""
    return f"{ROOT}.answer.{token(router_id)}"


def control_subject(worker_id: str) -> str:
    return f"{ROOT}.control.{token(worker_id)}"


def router_ping_subject(router_id: str) -> str:
    """Answered by a living router; "no responders" at once means that its connection is gone."""
    return f"{ROOT}.router.ping.{token(router_id)}"


def worker_ping_subject(worker_id: str) -> str:
    """Answered by a living worker with its incarnation (plain text)."""
    return f"{ROOT}.worker.ping.{token(worker_id)}"


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """What a request resolved to, once, at the entry. Nothing later looks anything up."""

    tenant_id: str
    tenant: str
    pool_id: str
    base: str  # full base identity
    adapter_id: str = ""  # empty: the base itself
    alias: str = ""  # the tenant's name for it, e.g. "lora_sales"
    version: int = 0
    digest: str = ""  # the adapter version's content digest, "sha256:<hex>"

    @property
    def public_model(self) -> str:
        """What answers show in `model`: `alias@version`, or the base's label."""
        return f"{self.alias}@{self.version}" if self.adapter_id else self.base.rsplit("@", 1)[0]

    @property
    def subject_id(self) -> str:
        return self.adapter_id or base_subject_id(self.base)


class InferRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str  # server-made ULID, also the key of usage
    attempt: int
    router_id: str
    handle: Handle
    path: str  # OpenAI path, e.g. "/v1/chat/completions"
    body: bytes  # the client's JSON, unread but for `model` and `stream`
    method: str = "POST"
    query: str = ""
    stream: bool = False
    budget_s: float = 600.0  # time left for the whole request, counted from when the worker reads it
    client_label: str = ""  # the client's x-request-id: a label, never an identity
    key_id: str = ""  # the API key that asked: for the usage record only


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    request_id: str
    attempt: int
    reason: str  # client_gone | attempt_given_up | router_stopping


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag="ack"):
    """The router has every frame up to and including seq of each (request_id, attempt, seq)."""

    router_id: str
    positions: tuple[tuple[str, int, int], ...]


class Resend(msgspec.Struct, frozen=True, kw_only=True, tag="resend"):
    """Send again every kept frame after `after_seq` (-1: all) of each (request_id, attempt, after_seq)."""

    router_id: str
    positions: tuple[tuple[str, int, int], ...]


Control = Cancel | Ack | Resend


class FrameKind(IntEnum):
    ACCEPTED = 0
    BOUNCED = 1  # data: text, why (draining, not_here, stale, stopping, full): nothing was started
    PROGRESS = 2  # queued or prefilling, or alive between tokens; not kept, not sequenced
    HEAD = 3  # data: Head
    BODY = 4  # data: body bytes, as made
    END = 5  # data: Totals
    ERROR = 6  # data: ErrorInfo


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    request_id: str
    attempt: int
    seq: int
    kind: FrameKind
    data: bytes = b""


class FrameBatch(msgspec.Struct, frozen=True, array_like=True):
    """Frames of many requests of one router, made in one turn of the worker's loop."""

    worker_id: str
    incarnation: str
    frames: list[Frame]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    content_type: str = "application/json"
    headers: dict[str, str] = {}


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine counted for the attempt."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    engine_ms: float = 0.0


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(InferRequest)
_control_decoder = msgspec.msgpack.Decoder(Control)
_batch_decoder = msgspec.msgpack.Decoder(FrameBatch)
_head_decoder = msgspec.msgpack.Decoder(Head)
_totals_decoder = msgspec.msgpack.Decoder(Totals)
_error_decoder = msgspec.msgpack.Decoder(ErrorInfo)

encode = _encoder.encode
decode_request = _request_decoder.decode
decode_control = _control_decoder.decode
decode_batch = _batch_decoder.decode
decode_head = _head_decoder.decode
decode_totals = _totals_decoder.decode
decode_error = _error_decoder.decode
