"""Which requests of an alias go to its version on trial.

A request's place in [0, 1,000,000) is a hash of what it is split by, under the trial's own salt: the same in every router and after
every restart, and another one in the next trial. Those below the share go on trial, so that a larger share moves nobody back.
"""

from hashlib import blake2b

from shared.contracts.adapters import Canary, CanaryBy

STABLE, TRIAL, ASKS = "stable", "canary", "1"  # what the canary header may say; anything else says nothing
_PLACES = 1_000_000


def place(salt: str, kind: str, key: str) -> int:
    """0 to 999,999. `kind` keeps sessions and requests of one text apart."""
    hashed = blake2b(f"{salt}\0{kind}\0{key}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(hashed) % _PLACES


def goes_on_trial(canary: Canary, request_id: str, session: str, header: str) -> bool:
    """`session`: empty, the request goes by itself.

    A header that names a version is obeyed under every rule. A trial that was stopped gets nothing.
    """
    if canary.stopped or header == STABLE:
        return False
    if header == TRIAL:
        return True
    if canary.by is CanaryBy.HEADER and header != ASKS:
        return False
    if session and canary.by is not CanaryBy.REQUEST:
        return place(canary.adapter_id, "session", session) < canary.share_ppm
    return place(canary.adapter_id, "request", request_id) < canary.share_ppm
