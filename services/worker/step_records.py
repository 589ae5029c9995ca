"""What an engine tells of its steps: the values, and their form on the way out of its process. Times are nanoseconds of the machine's
monotonic clock, which is the same in every process.
"""

import msgspec

SOCKET_VARIABLE = "TENANTRY_STEPS_SOCKET"  # where the engine's process finds whom to tell
PROBE_PREFIX = "probe-"  # requests of the platform itself

Interval = tuple[int, int]
Span = tuple[str, int, int]  # name, start, end


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One engine request in one step."""

    engine_id: str
    prefill_tokens: int
    decode_rows: int
    context_tokens: int  # whose keys and values its attention read
    adapter: int = 0  # the engine's number of it; 0: the base


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    number: int  # counts every step: a gap is a lost record
    busy: list[Interval]  # in which it computed
    rows: list[Row]


class StepBatch(msgspec.Struct, frozen=True, array_like=True):
    """Everything that ended before `until_ns` has been told once this batch has; 0: more of it follows."""

    until_ns: int
    idle_since_ns: int  # nothing has been scheduled since then; 0: something is
    steps: list[StepRecord]
    spans: list[Span]  # overhead and idle
    ended: list[str]  # engine requests that are in no further step


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(StepBatch).decode
