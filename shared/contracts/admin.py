"""The conversation between whoever manages (the router's admin plane, the CLI through it) and the registry: request, Reply.

Every operation is one tagged Struct sent to ADMIN_SUBJECT; any registry answers. Names of tenants and adapters are what
people use; the registry turns them into ids.
"""

from typing import Any

import msgspec

from shared.contracts.adapters import Canary, CanaryBy, CanaryStop, CanaryTerms, Mount, OnDeadline
from shared.contracts.audit import ListAudit
from shared.contracts.errors import ErrorInfo
from shared.contracts.state import Scope
from shared.contracts.subjects import ROOT
from shared.contracts.tenancy import TenantLimits
from shared.contracts.usage_query import GetEngines, GetUsage
from shared.contracts.workers import WorkerReport

ADMIN_SUBJECT = f"{ROOT}.admin"


class CreateTenant(msgspec.Struct, frozen=True, kw_only=True, tag="create_tenant"):
    name: str
    vram_quota_bytes: int = 0
    upgrade_headroom_bytes: int = 0
    base_allowed: bool = True
    nats_password: bool = False  # make a NATS user for it; the password is in the reply, once
    limits: dict[str, Any] = {}  # fields of TenantLimits; what is not named has its default


class UpdateTenant(msgspec.Struct, frozen=True, kw_only=True, tag="update_tenant"):
    """None leaves a field as it is."""

    name: str
    vram_quota_bytes: int | None = None
    upgrade_headroom_bytes: int | None = None
    adapter_ceilings: dict[str, int] | None = None
    default_adapter: str | None = None
    base_allowed: bool | None = None
    nats_password: bool = False  # make a new one
    limits: dict[str, Any] = {}  # fields of TenantLimits; what is not named stays, null takes a limit away


class ShowTenant(msgspec.Struct, frozen=True, kw_only=True, tag="show_tenant"):
    name: str


class ListTenants(msgspec.Struct, frozen=True, kw_only=True, tag="list_tenants"):
    pass


class DeleteTenant(msgspec.Struct, frozen=True, kw_only=True, tag="delete_tenant"):
    """Refused while it holds adapters; revokes its keys."""

    name: str


class CreateKey(msgspec.Struct, frozen=True, kw_only=True, tag="create_key"):
    tenants: tuple[str, ...]
    gateway: bool = False
    label: str = ""
    scopes: tuple[str, ...] = (Scope.INFER,)


class ListKeys(msgspec.Struct, frozen=True, kw_only=True, tag="list_keys"):
    """`own`: only keys that speak for this tenant alone, which are all that the tenant itself may see."""

    tenant: str = ""
    own: bool = False


class RevokeKey(msgspec.Struct, frozen=True, kw_only=True, tag="revoke_key"):
    """`tenant`: only if the key speaks for this tenant alone; any other is as unknown as one that does not exist."""

    key_id: str
    tenant: str = ""


class RotateKey(msgspec.Struct, frozen=True, kw_only=True, tag="rotate_key"):
    """A new secret for the same tenants and scopes; the old one works for overlap_s more. `tenant` as for RevokeKey."""

    key_id: str
    overlap_s: float = 3600.0
    tenant: str = ""


class AddAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="add_adapter"):
    """Validate, admit and mount what lies in the staging bucket; answers when it is ready, refused or failed (or after wait_s).

    Without `object`, the newest artifact already uploaded under this tenant and name is mounted.
    """

    tenant: str
    name: str
    object: str = ""  # in STAGING_BUCKET; removed by the registry when taken
    base: str = ""  # an explicit base identity
    pool_id: str = ""  # empty: the only one
    ceiling_bytes: int | None = None  # this adapter's own ceiling, kept in the tenant's record
    drain_first: bool = False  # give the old version's room to the new one: the alias is down in between
    make_default: bool = False
    request: str = ""
    wait_s: float = 120.0
    trial: CanaryTerms | None = None  # put it on trial beside the version that serves; without `object`, a stored version at rest
    version: int = 0  # which stored version goes on trial; 0: the newest


class ListAdapters(msgspec.Struct, frozen=True, kw_only=True, tag="list_adapters"):
    tenant: str = ""
    all_versions: bool = False  # also those unloaded, rejected and failed


class ShowAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="show_adapter"):
    tenant: str
    name: str
    version: int = 0  # 0: the one that serves, else the newest


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="unload_adapter"):
    """`mode` other than "draining" is refused with the reason."""

    tenant: str
    name: str
    mode: str = "draining"
    version: int = 0  # 0: every mounted version of the name
    deadline_s: float = 300.0
    on_deadline: OnDeadline = OnDeadline.ABORT
    wait_s: float = 0.0  # answer at once (0) or when drained


class RemoveAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="remove_adapter"):
    """Forgets versions that are not mounted, and their stored files. Refused while one of them is."""

    tenant: str
    name: str
    version: int = 0  # 0: every version of the name


class ListCanaries(msgspec.Struct, frozen=True, kw_only=True, tag="list_canaries"):
    """Trials that run or were stopped."""

    tenant: str = ""
    name: str = ""


class ChangeCanary(msgspec.Struct, frozen=True, kw_only=True, tag="change_canary"):
    """None leaves a term as it is; `resume` lets one that was stopped run again."""

    tenant: str
    name: str
    share_ppm: int | None = None
    by: CanaryBy | None = None
    stop: dict[str, float] = {}  # fields of CanaryStop
    resume: bool = False


class PromoteCanary(msgspec.Struct, frozen=True, kw_only=True, tag="promote_canary"):
    """The alias becomes the trial version's, and the one that served drains: one change."""

    tenant: str
    name: str
    version: int = 0  # only if this one is on trial; 0: whichever is
    deadline_s: float = 300.0
    on_deadline: OnDeadline = OnDeadline.WAIT  # nothing is cut


class RollBackCanary(msgspec.Struct, frozen=True, kw_only=True, tag="roll_back_canary"):
    """The trial is over and its version drains; the alias stays where it is."""

    tenant: str
    name: str
    version: int = 0
    deadline_s: float = 300.0
    on_deadline: OnDeadline = OnDeadline.WAIT  # nothing is cut


class ListEvents(msgspec.Struct, frozen=True, kw_only=True, tag="list_events"):
    tenant: str = ""
    name: str = ""
    limit: int = 100


class GetMatrix(msgspec.Struct, frozen=True, kw_only=True, tag="get_matrix"):
    pass


class SetLabel(msgspec.Struct, frozen=True, kw_only=True, tag="set_label"):
    """Adds a base identity under a label (`label` or `label@revision`)."""

    label: str
    base: str


class RemoveLabel(msgspec.Struct, frozen=True, kw_only=True, tag="remove_label"):
    label: str
    base: str = ""  # empty: all of the label's


class SetPair(msgspec.Struct, frozen=True, kw_only=True, tag="set_pair"):
    adapter_digest: str
    base: str
    allowed: bool
    note: str = ""


class RemovePair(msgspec.Struct, frozen=True, kw_only=True, tag="remove_pair"):
    adapter_digest: str
    base: str


class ListPools(msgspec.Struct, frozen=True, kw_only=True, tag="list_pools"):
    """Pools with their workers, quotas held per tenant, and last reports."""


class RemoveWorker(msgspec.Struct, frozen=True, kw_only=True, tag="remove_worker"):
    """A worker that will not come back: its reservations are released."""

    pool_id: str
    worker_id: str


class SetRouting(msgspec.Struct, frozen=True, kw_only=True, tag="set_routing"):
    header: str
    default: str


AdminRequest = (
    CreateTenant
    | UpdateTenant
    | ShowTenant
    | ListTenants
    | DeleteTenant
    | CreateKey
    | ListKeys
    | RevokeKey
    | RotateKey
    | AddAdapter
    | ListAdapters
    | ShowAdapter
    | UnloadAdapter
    | RemoveAdapter
    | ListCanaries
    | ChangeCanary
    | PromoteCanary
    | RollBackCanary
    | ListEvents
    | GetMatrix
    | SetLabel
    | RemoveLabel
    | SetPair
    | RemovePair
    | ListPools
    | RemoveWorker
    | SetRouting
    | GetUsage
    | GetEngines
    | ListAudit
)


class OnBehalf(msgspec.Struct, frozen=True, kw_only=True, tag="on_behalf"):
    """An operation with who asks for it, as the router that let them in knows them. Without this it is nobody's in particular."""

    who: str = "unknown"
    address: str = ""
    request: AdminRequest


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of the two is set. `result` is a JSON value as the operation's view below says."""

    result: Any = None
    error: ErrorInfo | None = None


class QuotaFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One quota: what is asked for and waits, held now, and allowed (None: not limited), in the unit that `resource` names."""

    resource: str  # vram_bytes | kv_bytes | concurrent | host_cache_bytes | artifact_bytes | requests_per_minute | tokens_per_minute
    pool_id: str = ""
    worker_id: str = ""
    asked: int = 0
    held: int = 0
    allowed: int | None = None

    @property
    def over(self) -> bool:
        """More is held than is allowed, since the quota was lowered: nothing is taken away, and nothing new gets in."""
        return self.allowed is not None and self.held > self.allowed


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    tenant_id: str
    name: str
    vram_quota_bytes: int
    vram_held_bytes: int
    upgrade_headroom_bytes: int
    adapters: int
    base_allowed: bool
    default_adapter: str = ""
    adapter_ceilings: dict[str, int] = {}
    nats_user: str = ""
    nats_password: str = ""  # only in the reply that made it
    limits: TenantLimits = TenantLimits()
    figures: tuple[QuotaFigure, ...] = ()
    over_quota: tuple[str, ...] = ()  # resources of which more is held than is allowed
    notes: tuple[str, ...] = ()  # what could not be checked, and what does not fit


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    key_id: str
    label: str
    tenants: tuple[str, ...]
    gateway: bool
    revoked: bool
    created_at: str
    secret: str = ""  # only in the reply that made it
    scopes: tuple[str, ...] = (Scope.INFER,)
    prefix: str = ""
    expires_at: str = ""
    replaces: str = ""  # key_id of the one that was rotated; only in the reply that made it


class AdapterView(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    name: str
    version: int
    adapter_id: str
    digest: str
    state: str
    serving: bool  # the alias points at this version
    pool_id: str
    base: str
    base_label: str
    provenance: str
    worker_id: str
    rank: int
    rank_class: int
    slot_bytes: int
    true_bytes: int
    size_bytes: int
    modules: int
    error: ErrorInfo | None = None
    history: tuple[dict[str, Any], ...] = ()
    load_ms: float = 0.0
    on_trial: bool = False


class TrialFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One version over the trial's window, as the registry that answers has heard it. `p95_ms`: to the first byte, at most 19% too high.

    `refused`: by the engine, as its client's mistake; not among `requests`.
    """

    requests: int = 0
    errors: int = 0
    refused: int = 0
    p50_ms: float = 0.0
    p95_ms: float = 0.0


class CanaryView(msgspec.Struct, frozen=True, kw_only=True):
    """`stable_version` 0: the version that served is gone; the trial's can still be promoted."""

    tenant: str
    name: str
    pool_id: str
    stable_version: int
    version: int
    state: str  # of the version on trial
    share_ppm: int
    by: CanaryBy
    stop: CanaryStop
    started_at: str
    stopped: str = ""
    stable: TrialFigures = TrialFigures()
    trial: TrialFigures = TrialFigures()


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    incarnation: str
    engine: str
    slots: int
    slots_held: int
    max_rank: int
    bytes_per_rank: int
    report: WorkerReport | None = None  # the last one this registry has heard
    report_age_s: float = -1.0  # -1: none heard


class PoolTenantView(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    vram_held_bytes: int
    vram_quota_bytes: int
    upgrade_headroom_bytes: int


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    pool_id: str
    base: str
    generation: int  # revision of the pool's entry
    workers: tuple[WorkerView, ...] = ()
    tenants: tuple[PoolTenantView, ...] = ()
    mounts: tuple[Mount, ...] = ()
    aliases: dict[str, dict[str, str]] = {}  # tenant -> alias -> adapter_id that serves it
    canaries: dict[str, dict[str, Canary]] = {}  # tenant -> alias -> its trial
    kv_cache_bytes: int | None = None  # of all its workers; None: one has not said
    kv_guaranteed_bytes: int = 0  # to all tenants
    notes: tuple[str, ...] = ()  # what cannot be kept of that now


encode = msgspec.json.Encoder().encode
decode_request = msgspec.json.Decoder(AdminRequest).decode
_decode_asked = msgspec.json.Decoder(AdminRequest | OnBehalf).decode
decode_reply = msgspec.json.Decoder(Reply).decode


def decode_asked(data: bytes) -> OnBehalf:
    """An operation, with or without who asks for it."""
    asked = _decode_asked(data)
    return asked if isinstance(asked, OnBehalf) else OnBehalf(request=asked)
