"""What stands in JetStream KV: the STATE bucket (all that routing needs, under one watch) and the CATALOG bucket (the rest).

STATE keys: `hb` (the registries' heartbeat), `config.routing`, `tenant.<name>`, `key.<sha256 of the secret>`, `pool.<pool_id>`,
`shares.<pool_id>.<tenant_id>` (shared/contracts/tenancy.py).
CATALOG keys: `adapter.<adapter_id>`, `base.<digest>`, `matrix`, `upload.<tenant_id>.<name>.<digest>` (the adapter_id that these bytes
are, under this name, for this tenant), `stored.<tenant_id>`.
One watch over STATE carries heartbeat, keys and routes alike: a watch that shows the heartbeat shows everything.
"""

from enum import StrEnum

import msgspec

from shared.contracts.adapters import CanaryTerms
from shared.contracts.errors import ErrorInfo
from shared.contracts.tenancy import TenantLimits
from shared.policy.lifecycle import AdapterState

STATE_BUCKET = "tenantry_state"
CATALOG_BUCKET = "tenantry_catalog"

HEARTBEAT_KEY = "hb"
ROUTING_KEY = "config.routing"
MATRIX_KEY = "matrix"
TENANT_PREFIX = "tenant."
KEY_PREFIX = "key."
POOL_PREFIX = "pool."
ADAPTER_PREFIX = "adapter."
BASE_PREFIX = "base."
UPLOAD_PREFIX = "upload."
STORED_PREFIX = "stored."

NAME_PATTERN = r"[a-z0-9][a-z0-9_-]{0,62}"  # tenants' and adapters' names


class RoutingDefault(StrEnum):
    BASE_ONLY = "base_only"
    REJECT = "reject"


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    header: str = "x-tenant"
    default: RoutingDefault = RoutingDefault.REJECT


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    tenant_id: str  # opaque, made by the registry
    name: str
    vram_quota_bytes: int = 0  # per pool; the sum of its adapters' slot_bytes may not pass it
    upgrade_headroom_bytes: int = 0  # may be held besides, only by a second version of an alias while it is switched
    adapter_ceilings: dict[str, int] = {}  # adapter name -> bytes, each adapter's own ceiling
    default_adapter: str = ""  # serves requests whose `model` is absent, empty or "default"; empty: the only one
    base_allowed: bool = True
    nats_password_bcrypt: str = ""  # empty: this tenant has no NATS user
    limits: TenantLimits = TenantLimits()


class Scope(StrEnum):
    INFER = "infer"  # the OpenAI paths
    ADAPTERS = "adapters"  # its own tenant's adapters: upload, list, show, unload
    ADMIN = "admin"  # its own tenant's keys and what it may see of itself


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """Stored under the SHA-256 of the secret (256 random bits, so a plain hash cannot be searched)."""

    key_id: str
    label: str
    tenants: tuple[str, ...]  # names this key may speak for; exactly one unless gateway
    gateway: bool = False  # speaks for several, named by the routing header
    revoked: bool = False
    created_at: str = ""
    scopes: tuple[Scope, ...] = (Scope.INFER,)
    prefix: str = ""  # the secret's first characters: by which people tell keys apart
    expires_at: str = ""  # RFC 3339, UTC; set when it was rotated, so that both work for a while; empty: never


class Provenance(StrEnum):
    DECLARED = "declared"
    ALIAS = "alias"


class HistoryStep(msgspec.Struct, frozen=True, kw_only=True):
    state: AdapterState
    at: str  # RFC 3339, UTC
    note: str = ""
    action: str = ""  # what else happened to it in this state (canary.promoted); empty: it came into the state


class Intake(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for when the version came in: enough for any registry to start its validation over."""

    bucket: str = ""  # object store that holds the upload; empty: the version's own artifact is mounted again
    object: str = ""
    base: str = ""  # an explicit base identity
    drain_first: bool = False
    trial: CanaryTerms | None = None  # it comes in as a canary's version
    starts: int = 0  # how often its validation has been started
    beat: int = 0  # grows while a registry works on it; one that stands still has lost its registry


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The catalog's entry of one adapter version. While it is mounted, the pool's entry is the authority on `state`."""

    adapter_id: str
    tenant_id: str
    tenant: str
    name: str
    version: int
    digest: str
    pool_id: str
    state: AdapterState
    size_bytes: int = 0  # of the files as uploaded
    base: str = ""  # the identity it was admitted against
    base_label: str = ""  # as the artifact names it: label or label@revision
    provenance: Provenance | None = None
    rank: int = 0
    rank_class: int = 0
    slot_bytes: int = 0
    true_bytes: int = 0
    modules: int = 0
    artifact: str = ""
    artifact_sha256: str = ""
    artifact_bytes: int = 0
    worker_id: str = ""
    released: dict[str, int] = {}  # once drained: the figures of its AdapterDrained
    error: ErrorInfo | None = None
    request: str = ""  # the uploader's mark
    history: tuple[HistoryStep, ...] = ()
    intake: Intake = Intake()
    generation: int = 0  # revision of the pool's entry that `state` was last taken from
    load_ms: float = 0.0
    steps: int = 0  # ever taken; the newest stand in `history`
    told: int = 0  # of them, known to be in the audit and the events


class StoredFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant's stored adapter files take: bytes by adapter_id, written before the files are."""

    files: dict[str, int] = {}


class PairEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One explicit cell of the compatibility matrix."""

    adapter_digest: str
    base: str
    allowed: bool
    note: str = ""


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """`labels`: label or label@revision -> base identities."""

    labels: dict[str, tuple[str, ...]] = {}
    pairs: tuple[PairEntry, ...] = ()


encode = msgspec.json.Encoder().encode
decode_tenant = msgspec.json.Decoder(Tenant).decode
decode_key = msgspec.json.Decoder(ApiKey).decode
decode_routing = msgspec.json.Decoder(Routing).decode
decode_record = msgspec.json.Decoder(AdapterRecord).decode
decode_stored = msgspec.json.Decoder(StoredFiles).decode
decode_matrix = msgspec.json.Decoder(Matrix).decode
