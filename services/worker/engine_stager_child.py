"""`python -m services.worker.engine_stager_child FD`: packs adapters into the host tier's memory, beside everything that serves.

Reads a JSON line for each order, writes one for each answer, ends with its input. Low priority: nobody waits for a token on it.
"""

import mmap
import os
import sys
from pathlib import Path

import msgspec
import numpy as np

from services.worker.engine_image import Packed, SlotLayout, pack
from shared.errors import LoadFailed

_NICE = 10


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The first carries the layout and no folder."""

    folder: str = ""
    image: int = 0
    layout: SlotLayout | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    packed: Packed | None = None
    message: str = ""
    reason: str = ""


def main(fd: int) -> None:
    os.nice(_NICE)
    decode = msgspec.json.Decoder(Order).decode
    layout = decode(sys.stdin.buffer.readline()).layout
    assert layout is not None
    images = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
    _say(Outcome())
    for line in sys.stdin.buffer:
        order = decode(line)
        start = order.image * layout.image_bytes
        try:
            packed = pack(Path(order.folder), layout, images[start : start + layout.image_bytes])
            _say(Outcome(packed=packed))
        except LoadFailed as error:
            _say(Outcome(message=error.message, reason=str(error.fields.get("reason", ""))))
        except Exception as error:  # noqa: BLE001  one adapter's fault is that adapter's
            _say(Outcome(message=f"{type(error).__name__}: {error}", reason="refused_by_engine"))


def _say(outcome: Outcome) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
