"""The registry's settings, from TENANTRY_REGISTRY_*."""

import msgspec


class RegistrySettings(msgspec.Struct, frozen=True, kw_only=True):
    registry_id: str = ""  # empty: made at start
    work_dir: str = ""  # in a folder of its own in here uploads are unpacked; empty: the system's temporary folder
    heartbeat_ms: int = 250
    reconcile_s: float = 1.0
    housekeeping_s: float = 30.0  # between searches for artifacts and staged objects that nobody needs
    shares_s: float = 0.25  # between looks at whether work waits that another worker has room for
    canary_watch_s: float = 1.0  # between looks at what versions on trial do
    reissue_s: float = 5.0  # a mount that stands this long in one state has its command sent again
    abandoned_s: float = 6.0  # a validation that stands this long still has lost its registry
    staged_max_s: float = 3600.0
    refusals_kept: int = 50  # per tenant; older rejected uploads are forgotten
    upload_limit_bytes: int = 16 << 30
    tenant_uploads_limit_bytes: int = 20 << 30  # what a tenant's own upload bucket holds at most
    max_requests: int = 256  # management requests under way at once; more are told to come again
    max_validations: int = 2
    bus_patience_s: float = 30.0
    grace_s: float = 5.0  # for requests under way when told to stop
    audit_kept_days: int = 400  # of what was done and by whom; 0: for ever
    usage_db: str = ""  # the usage projection's SQLite file, on a disk of this registry's own; empty: made anew at every start
    usage_round_s: float = 1.0  # between looks for engines that are gone and charges that have ended
    usage_ended_s: float = 5.0  # a replaced engine's open requests are closed once nothing more has come of them for this long
    usage_silence_s: float = 30.0  # the same of an engine that no report has been heard of
    usage_residency_s: float = 60.0  # between checkpoints of what adapters hold
    usage_keep_days: int = 30  # records of closed days stay in the stream this long after their snapshot was stored
    usage_max_bytes: int = 0  # hard bound of the usage stream, set aside on the bus server's disk; 0: none
    usage_max_age_s: float = 0.0  # hard bound of its age; 0: none
    usage_warn_bytes: int = 4 << 30  # a stream larger than this is warned of
