"""Child processes that cannot outlive the one that started them, even by kill -9."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: int = signal.SIGKILL) -> Callable[[], None]:
    """For `preexec_fn`: the kernel sends the signal to the child when the thread that started it ends (Linux; elsewhere nothing).

    Call it in the parent, before the fork: what runs in the child then neither imports nor allocates much.
    """
    parent = os.getpid()
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
        if os.getppid() != parent:  # it ended between fork and prctl
            os._exit(1)

    return before_exec
