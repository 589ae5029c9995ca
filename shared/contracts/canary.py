"""The conversation about trials: what routers counted of both versions of an alias that has one on trial. Core NATS, every second.

Counters only grow while the trial lasts, so that a message that is lost is made up for by the next. Every registry hears all of them.
"""

import msgspec

from shared.contracts.subjects import ROOT, token

COUNTS_SUBJECTS = f"{ROOT}.canary.*"
ROWS_LIMIT = 5_000  # of one message: about 2 MB


def counts_subject(router_id: str) -> str:
    return f"{ROOT}.canary.{token(router_id)}"


class VersionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one version, since this router heard of the trial.

    An error is an answer that the version owed and did not give: a status of 500 or more, or a stream that broke off. What the engine
    refused as its client's mistake is counted apart; what a client was refused before the engine, or did not wait for, not at all.
    """

    trial: str  # adapter_id of the version on trial: the trial's name
    adapter_id: str  # whose counts these are: the trial's, or the stable version's
    requests: int
    errors: int
    first_byte: dict[int, int]  # answers by bucket (policy/canary_stop.py)
    number: int  # of this row: 0 for the first that this router sends
    refused: int = 0


class CanaryCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Only rows that have changed since the last one."""

    router_id: str
    versions: tuple[VersionCounts, ...]


encode = msgspec.msgpack.Encoder().encode
decode_counts = msgspec.msgpack.Decoder(CanaryCounts).decode
