"""Request ids: ULIDs (48 bits of milliseconds, 80 random bits, Crockford's base32), made in a microsecond."""

import base64
import os
import time

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_TO_CROCKFORD = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", _CROCKFORD.encode())


class RequestIds:
    """`next` gives a new id; the text of the present millisecond is made once."""

    def __init__(self) -> None:
        self._ms = -1
        self._prefix = ""

    def next(self) -> str:
        ms = time.time_ns() // 1_000_000
        if ms != self._ms:
            self._ms = ms
            self._prefix = "".join(_CROCKFORD[ms >> shift & 31] for shift in range(45, -1, -5))
        return self._prefix + base64.b32encode(os.urandom(10)).translate(_TO_CROCKFORD).decode()
