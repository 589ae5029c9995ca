"""What a tenant may use, and how its quotas are split over a pool's workers. STATE keys `shares.<pool_id>.<tenant_id>`.

A quota is the tenant's per pool. The registry splits KV cache and concurrency into shares, one entry per tenant and pool, changed
by compare-and-set; each worker's governor enforces its own. What a worker was told and has not acknowledged to be cut still counts.
"""

import msgspec

SHARES_PREFIX = "shares."
GATEWAY_TENANT = "_gateway"  # base traffic of gateway requests that carry no tenant mark; it has shares like a tenant, and no limits


def shares_key(pool_id: str, tenant_id: str) -> str:
    return f"{SHARES_PREFIX}{pool_id}.{tenant_id}"


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """None: no limit of the tenant's own; of KV cache it then has what no guarantee of another tenant covers."""

    kv_quota_bytes: int | None = None  # per pool: guaranteed, and with burst=False the most it may hold
    max_concurrent: int | None = None  # requests at once, per pool
    requests_per_minute: int | None = None  # over all pools and routers
    tokens_per_minute: int | None = None  # prompt and output
    host_cache_bytes: int | None = None  # packed adapters kept in a worker's host memory, per worker
    artifact_bytes: int | None = None  # stored files of all its versions
    burst: bool = False  # may borrow KV cache that others' guarantees leave unused; lent room is taken back from queued work first
    weight: int = 1  # share of the engine's time while several tenants have work
    default_max_tokens: int | None = None  # what a request without max_tokens reserves; None: as far as the model's length goes
    queue_limit: int = 256  # requests of this tenant that may wait on one worker
    queue_deadline_s: float = 30.0
    cache_group: str | None = None  # shares prefix-cache blocks with tenants whose own limits name the same group; None: with nobody


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part. `held_*`: the most that it may still be using of earlier, larger parts; equal once it has acknowledged.

    None: not limited. The sum over workers of max(part, held) never passes the quota. `assured_kv_bytes`: what of the part only this
    tenant can draw on; None: all of it (an entry of before there was a difference). Enforced by that `incarnation` alone: a
    worker that finds another's here, or no part of its own under limits, has none until it is given one.
    """

    incarnation: str
    kv_bytes: int | None = None
    concurrent: int | None = None
    held_kv_bytes: int = 0
    held_concurrent: int = 0
    assured_kv_bytes: int | None = None


class TenantShares(msgspec.Struct, frozen=True, kw_only=True):
    """What workers know of a tenant: its limits as last decided, and their parts."""

    tenant_id: str
    tenant: str
    limits: TenantLimits
    workers: dict[str, Share] = {}  # by worker_id


encode = msgspec.json.Encoder().encode
decode_shares = msgspec.json.Decoder(TenantShares).decode
