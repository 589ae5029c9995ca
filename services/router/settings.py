"""The router's settings, read once from TENANTRY_ROUTER_*."""

import msgspec

from shared.bus import MAX_PAYLOAD_BYTES

ENVELOPE_HEADROOM_BYTES = 64 * 1024  # the handle, ids and query that travel with the body in one message


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`admin_key_sha256` is the hex SHA-256 of the admin credential; without it the admin plane refuses everything."""

    host: str = "127.0.0.1"
    port: int = 8080
    router_id: str = ""  # empty: made at start
    admin_key_sha256: str = ""
    body_limit_bytes: int = MAX_PAYLOAD_BYTES - ENVELOPE_HEADROOM_BYTES
    upload_limit_bytes: int = 4 << 30
    body_timeout_s: float = 120.0  # for a request's body to come whole: until then it takes one of max_concurrent
    head_timeout_s: float = 10.0  # for a request's head to come whole, and for a new connection's first one
    keep_alive_s: int = 75  # a connection on which nothing is asked for this long is closed
    max_connections: int = 16_384  # beyond, one that is idle is closed for a new one, or the new one is told to come again
    max_concurrent: int = 4096  # requests in this router at once; more are 429 overloaded
    tenant_max_concurrent: int = 2048  # of these, of one tenant
    tenant_admin_max_concurrent: int = 8  # a tenant's own requests to the admin plane at once
    tenant_changes_per_minute: int = 120  # of what a tenant's own keys may change on the admin plane
    tenant_uploads_at_once: int = 4  # and of these, uploads

    attempts: int = 3
    accept_timeout_s: float = 0.3
    lone_accept_timeout_s: float = 1.5  # where no other worker could be asked instead: a stall of the machine is no reason to ask twice
    last_accept_timeout_s: float = 5.0  # the last attempt has nowhere else to go
    progress_timeout_s: float = 5.0  # a worker sends something about every request each second
    first_token_timeout_s: float = 300.0
    inter_token_timeout_s: float = 30.0
    gap_timeout_s: float = 1.0
    bounce_patience_s: float = 3.0  # how long a bounced request waits for the routes to change
    request_budget_s: float = 600.0
    client_stall_timeout_s: float = 120.0  # a client that takes nothing of a finished answer for this long is cut off
    answer_buffer_bytes: int = 4 << 20  # of one stream, waiting for a slow client
    answer_limit_bytes: int = 64 << 20  # of one answer that is not streamed

    watch_silence_s: float = 0.75
    stale_after_s: float = 3.0
    nats_patience_s: float = 30.0
    grace_s: float = 30.0  # for streams that run when the router is told to stop
