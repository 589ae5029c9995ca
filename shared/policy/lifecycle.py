"""The life of one adapter version, as a table. The registry executes it, workers acknowledge it; this decides nothing else."""

from enum import StrEnum


class AdapterState(StrEnum):
    UPLOADED = "uploaded"
    VALIDATING = "validating"
    ADMITTED = "admitted"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    UNLOADED = "unloaded"
    REJECTED = "rejected"
    FAILED = "failed"


class LifecycleEvent(StrEnum):
    VALIDATION_STARTED = "validation_started"
    VALIDATION_REFUSED = "validation_refused"
    RESERVED = "reserved"  # validated, compatible, and its slot cost is in the ledger
    LOAD_ORDERED = "load_ordered"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    DRAIN_ORDERED = "drain_ordered"
    DRAINED = "drained"
    WORKER_RESTARTED = "worker_restarted"  # a new incarnation holds nothing yet
    WORKER_LOST = "worker_lost"  # the worker left the pool for good
    REMOUNT_ORDERED = "remount_ordered"


class IllegalTransition(Exception):
    """The event cannot happen in this state; nothing has changed."""

    def __init__(self, state: AdapterState, event: LifecycleEvent) -> None:
        super().__init__(f"{event} cannot happen to an adapter that is {state}")
        self.state = state
        self.event = event


_S = AdapterState
_E = LifecycleEvent
TRANSITIONS: dict[tuple[AdapterState, LifecycleEvent], AdapterState] = {
    (_S.UPLOADED, _E.VALIDATION_STARTED): _S.VALIDATING,
    (_S.UPLOADED, _E.VALIDATION_REFUSED): _S.REJECTED,
    (_S.VALIDATING, _E.VALIDATION_STARTED): _S.VALIDATING,  # a registry died while validating: another starts over
    (_S.VALIDATING, _E.VALIDATION_REFUSED): _S.REJECTED,
    (_S.VALIDATING, _E.RESERVED): _S.ADMITTED,
    (_S.ADMITTED, _E.LOAD_ORDERED): _S.LOADING,
    (_S.ADMITTED, _E.DRAIN_ORDERED): _S.DRAINING,
    (_S.ADMITTED, _E.WORKER_RESTARTED): _S.ADMITTED,
    (_S.ADMITTED, _E.WORKER_LOST): _S.FAILED,
    (_S.LOADING, _E.LOAD_ORDERED): _S.LOADING,
    (_S.LOADING, _E.LOADED): _S.READY,
    (_S.LOADING, _E.LOAD_FAILED): _S.FAILED,
    (_S.LOADING, _E.DRAIN_ORDERED): _S.DRAINING,
    (_S.LOADING, _E.WORKER_RESTARTED): _S.LOADING,
    (_S.LOADING, _E.WORKER_LOST): _S.FAILED,
    (_S.READY, _E.DRAIN_ORDERED): _S.DRAINING,
    (_S.READY, _E.LOAD_FAILED): _S.FAILED,  # found gone from the engine, and it cannot be mounted again
    (_S.READY, _E.WORKER_RESTARTED): _S.LOADING,
    (_S.READY, _E.WORKER_LOST): _S.FAILED,
    (_S.DRAINING, _E.DRAIN_ORDERED): _S.DRAINING,
    (_S.DRAINING, _E.DRAINED): _S.UNLOADED,
    (_S.DRAINING, _E.WORKER_RESTARTED): _S.DRAINING,
    (_S.DRAINING, _E.WORKER_LOST): _S.UNLOADED,
    (_S.UNLOADED, _E.REMOUNT_ORDERED): _S.VALIDATING,
    (_S.FAILED, _E.REMOUNT_ORDERED): _S.VALIDATING,
    (_S.REJECTED, _E.REMOUNT_ORDERED): _S.VALIDATING,
}

HOLDS_RESERVATION = frozenset({_S.ADMITTED, _S.LOADING, _S.READY, _S.DRAINING})


def step(state: AdapterState, event: LifecycleEvent) -> AdapterState:
    """The next state.

    :raises IllegalTransition: the table has no such row.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(state, event) from None


def diagram() -> str:
    """The table as a Mermaid state diagram, for docs/lifecycle.md."""
    rows = [f"    {a.value} --> {b.value}: {event.value}" for (a, event), b in TRANSITIONS.items() if a != b]
    return "\n".join(["stateDiagram-v2", "    [*] --> uploaded", *rows])
