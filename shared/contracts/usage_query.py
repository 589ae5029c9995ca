"""Questions about usage, part of the conversation between managers and the registry (admin.py), and their answers."""

import msgspec

from shared.policy.usage_rollup import Amounts

GROUPS = ("day", "tenant", "adapter", "version", "key")
MAX_DAYS = 800


class GetUsage(msgspec.Struct, frozen=True, kw_only=True, tag="get_usage"):
    """Times in milliseconds since 1970, on quarters of an hour. Without groups: one row of everything.

    `tenant`: a name or an id, also of one that was deleted. `own`: only the present tenant of that name, which is all that its own key
    may see.
    """

    from_ms: int
    to_ms: int
    group_by: tuple[str, ...] = ("tenant",)
    zone: str = "UTC"  # whose midnights part days
    tenant: str = ""
    own: bool = False


class GetEngines(msgspec.Struct, frozen=True, kw_only=True, tag="get_engines"):
    from_ms: int
    to_ms: int


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of groups that were not asked for are empty. `alias` empty: the base itself; `base` too: refused before it was known."""

    tenant_id: str = ""
    tenant: str = ""  # its last name
    alias: str = ""
    base: str = ""
    version: int = 0
    digest: str = ""
    key_id: str = ""
    day: str = ""
    outcomes: dict[str, int] = {}  # requests by how they ended
    amounts: Amounts = Amounts()


class UsageReply(msgspec.Struct, frozen=True, kw_only=True):
    """`sequence`: all of the usage stream up to this message is in it.

    Since the beginning: `refused` records that could not be, and `missing` messages that were gone before this registry read them.
    """

    from_ms: int
    to_ms: int
    zone: str
    group_by: tuple[str, ...]
    rows: list[UsageRow]
    sequence: int
    refused: int = 0
    missing: int = 0


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """wall_us = busy_us + idle_us + sum(overhead_us) + unaccounted_us."""

    worker_id: str
    incarnation: str
    pool_id: str
    wall_us: int
    busy_us: int
    idle_us: int
    overhead_us: dict[str, int]
    unaccounted_us: int
    billed_us: int
    steps: int


class EnginesReply(msgspec.Struct, frozen=True, kw_only=True):
    from_ms: int
    to_ms: int
    rows: list[EngineRow]
    sequence: int
