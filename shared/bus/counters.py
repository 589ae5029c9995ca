"""Counter streams of JetStream: subjects that are numbers, moved by a header, exact whoever writes at the same time."""

from typing import Any

import msgspec
import nats.errors
import nats.js.errors

from shared.bus.connection import Bus, BusUnavailable

INCREMENT_HEADER = "Nats-Incr"


class _Value(msgspec.Struct):
    val: str = "0"


class _Made(msgspec.Struct):
    error: dict[str, Any] | None = None


class Moved(msgspec.Struct, frozen=True):
    """The server's answer to an increment. `val` is where the counter stands then."""

    val: str = ""
    error: dict[str, Any] | None = None


_decode_value = msgspec.json.Decoder(_Value).decode
_decode_made = msgspec.json.Decoder(_Made).decode
decode_moved = msgspec.json.Decoder(Moved).decode


async def ensure_counters(bus: Bus, name: str, subjects: tuple[str, ...], max_age_s: float) -> None:
    """The stream exists, on file, each subject a counter that is forgotten max_age_s after it last moved.

    :raises BusUnavailable: no answer, or the server refuses (counters need nats-server 2.12).
    """
    config = {
        "name": name,
        "subjects": list(subjects),
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "max_msgs_per_subject": 1,
        "max_age": int(max_age_s * 1e9),
        "allow_msg_counter": True,
        "allow_direct": True,
    }
    problem = ""
    for verb in ("CREATE", "UPDATE"):  # it may stand with other settings of an earlier version
        answer = _decode_made(await bus.request(f"$JS.API.STREAM.{verb}.{name}", msgspec.json.encode(config), 5.0))
        if answer.error is None:
            return
        problem = str(answer.error.get("description", answer.error))
    raise BusUnavailable(f"stream {name} cannot be made: {problem[:300]}", retry_after_s=1.0)


async def counted(bus: Bus, stream: str, subject: str) -> int:
    """Where the counter stands; 0 if it never moved.

    :raises BusUnavailable: no answer.
    """
    try:
        message = await bus.js.get_last_msg(stream, subject, direct=True)
    except nats.js.errors.NotFoundError:
        return 0
    except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
        raise BusUnavailable(f"cannot read {subject}: {error}", retry_after_s=1.0) from error
    return int(_decode_value(message.data or b"{}").val)
