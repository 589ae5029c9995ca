"""Who this worker is on the bus: said in every acknowledgement, report, frame and usage record."""

import msgspec


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    incarnation: str  # ULID made at this process's start
    pool_id: str
