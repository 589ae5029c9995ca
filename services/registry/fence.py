"""Makes decisions that rest on what has just been changed elsewhere fail their compare-and-set, and be taken anew."""

from collections.abc import Callable

from shared.bus import Bucket, Entry
from shared.errors import Conflict

_ATTEMPTS = 8


async def fence(bucket: Bucket, key: str, empty: bytes | None = None, rewritten: Callable[[Entry], bytes] | None = None) -> None:
    """Writes the entry as it is, or as `rewritten` makes it from the entry with its stamp.

    Whoever read it before, and decided by limits that have been lowered since, is too late when this returns. Decisions read this
    entry first and what they go by afterwards; so one that reads it later goes by what stands now. `empty`: what is written where
    there is no entry yet, so that nobody makes it from what he read before.
    """
    for _ in range(_ATTEMPTS):
        found = await (bucket.get(key) if rewritten is None else bucket.stamped(key))
        if found is None and empty is None:
            return
        try:
            if found is not None:
                await bucket.update(key, found.value if rewritten is None else rewritten(found), found.revision)
            elif empty is not None:
                await bucket.create(key, empty)
        except Conflict:
            continue  # somebody wrote it; whether after the limits were changed is not known
        return
