"""When a trial ends by itself: what its version did over the window, against what the stable version did.

No rule speaks before the version on trial has answered min_requests, and all want more than chance explains: more than the
expected number, twice its root, and one. A stable version that fails, refuses or slows down as much excuses the other.
"""

import math

import msgspec

from shared.contracts.adapters import CanaryStop

_PER_OCTAVE = 4
_LAST_BUCKET = 20 * _PER_OCTAVE  # 2^20 ms
_TAIL = 0.05  # of the stable version's requests are later than its p95


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one version. `first_byte`: answers by bucket of their time to the first byte.

    `refused`: what the engine refused as its client's mistake, which is not among `requests`. Such mistakes come to both versions
    alike; more of them are the version's own, e.g. its chat template's.
    """

    requests: int = 0
    errors: int = 0
    refused: int = 0
    first_byte: dict[int, int] = {}

    @property
    def error_rate(self) -> float:
        return self.errors / self.requests if self.requests else 0.0

    @property
    def asked(self) -> int:
        return self.requests + self.refused

    @property
    def refusal_rate(self) -> float:
        return self.refused / self.asked if self.asked else 0.0

    def quantile_ms(self, part: float) -> float:
        """An upper bound of the time within which this part had its first byte; 0 if nothing had."""
        left = part * sum(self.first_byte.values())
        for bucket in sorted(self.first_byte):
            left -= self.first_byte[bucket]
            if left <= 0:
                return upper_ms(bucket)
        return 0.0


def bucket_of(first_byte_ms: float) -> int:
    """Bounds grow by a fourth of an octave: 19%."""
    return min(max(math.ceil(_PER_OCTAVE * math.log2(first_byte_ms)), 0), _LAST_BUCKET) if first_byte_ms > 1.0 else 0


def upper_ms(bucket: int) -> float:
    return 2.0 ** (bucket / _PER_OCTAVE)


def plus(one: Counts, other: Counts) -> Counts:
    buckets = one.first_byte.keys() | other.first_byte.keys()
    first_byte = {bucket: one.first_byte.get(bucket, 0) + other.first_byte.get(bucket, 0) for bucket in buckets}
    return Counts(
        requests=one.requests + other.requests,
        errors=one.errors + other.errors,
        refused=one.refused + other.refused,
        first_byte=first_byte,
    )


def since(now: Counts, before: Counts) -> Counts:
    """What came between two readings of counters that only grow."""
    first_byte = {bucket: more for bucket, count in now.first_byte.items() if (more := count - before.first_byte.get(bucket, 0)) > 0}
    return Counts(
        requests=max(0, now.requests - before.requests),
        errors=max(0, now.errors - before.errors),
        refused=max(0, now.refused - before.refused),
        first_byte=first_byte,
    )


def verdict(stable: Counts, trial: Counts, stop: CanaryStop) -> str:
    """Why the trial has to end; empty: nothing speaks against it."""
    return _failing(stable, trial, stop) or _refusing(stable, trial, stop) or _slow(stable, trial, stop)


def _failing(stable: Counts, trial: Counts, stop: CanaryStop) -> str:
    if trial.requests < stop.min_requests or not _worse(trial.errors, trial.requests, stable.error_rate, stop):
        return ""
    return (
        f"{trial.errors} of {trial.requests} requests failed ({trial.error_rate:.1%}); of the stable version's {stable.errors} of"
        f" {stable.requests} ({stable.error_rate:.1%}), and {stop.error_rate_margin:.1%} more are allowed"
    )


def _refusing(stable: Counts, trial: Counts, stop: CanaryStop) -> str:
    if trial.asked < stop.min_requests or not _worse(trial.refused, trial.asked, stable.refusal_rate, stop):
        return ""
    return (
        f"{trial.refused} of {trial.asked} requests were refused by the engine ({trial.refusal_rate:.1%}); of the stable version's"
        f" {stable.refused} of {stable.asked} ({stable.refusal_rate:.1%}), and {stop.error_rate_margin:.1%} more are allowed"
    )


def _worse(seen: int, of: int, stable_rate: float, stop: CanaryStop) -> bool:
    return seen / of > stable_rate + stop.error_rate_margin and _beyond_chance(seen, of * stable_rate)


def _slow(stable: Counts, trial: Counts, stop: CanaryStop) -> str:
    answered = sum(trial.first_byte.values())
    if answered < stop.min_requests or sum(stable.first_byte.values()) < stop.min_requests:
        return ""
    usual_ms = stable.quantile_ms(1 - _TAIL)
    limit_ms = usual_ms * stop.latency_ratio
    late = sum(count for bucket, count in trial.first_byte.items() if bucket and upper_ms(bucket - 1) >= limit_ms)
    expected = answered * _TAIL
    if late <= expected or not _beyond_chance(late, expected):
        return ""
    return (
        f"{late} of {answered} answers began later than {limit_ms:.0f} ms, {stop.latency_ratio:g} times the stable version's p95"
        f" ({usual_ms:.0f} ms); {_TAIL:.0%} are expected"
    )


def _beyond_chance(seen: int, expected: float) -> bool:
    return seen > expected + 2 * math.sqrt(expected) + 1
