"""What a worker has to do about its mounts: pure decisions from the pool's entry, what the engine holds, and what is being done."""

from collections.abc import Mapping, Set
from enum import StrEnum

import msgspec

from shared.contracts.adapters import Mount, PoolEntry
from shared.policy.lifecycle import AdapterState

WANTED = frozenset({AdapterState.LOADING, AdapterState.READY})  # ADMITTED waits: its room may still be another's


class Action(StrEnum):
    LOAD = "load"
    SERVE = "serve"  # the engine holds it and it is wanted, but requests for it are not taken
    DRAIN = "drain"
    REMOVE = "remove"  # the engine holds what nobody wants
    SAY_LOADED = "say_loaded"
    SAY_FAILED = "say_failed"
    SAY_DRAINED = "say_drained"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    action: Action
    adapter_id: str
    mount: Mount | None = None


def mine(entry: PoolEntry, worker_id: str) -> dict[str, Mount]:
    """This worker's mounts by adapter_id."""
    return {adapter_id: mount for adapter_id, mount in entry.mounts.items() if mount.worker_id == worker_id}


def plan(
    mounts: Mapping[str, Mount],
    *,
    held: Set[str],
    proven: Set[str],
    served: Set[str],
    busy: Set[str],
    failed: Set[str],
    said: Mapping[str, Action],
) -> list[Step]:
    """The steps that bring the engine to the mounts; those that make room come first.

    `held`: the engine's own list; `proven`: loaded by us and shown to work; `served`: requests are taken for them; `busy`: a step of
    theirs is running; `failed`: their load failed under the present order; `said`: what was acknowledged about them lately.
    """
    leaving: list[Step] = []
    coming: list[Step] = []
    for adapter_id, mount in mounts.items():
        if adapter_id in busy:
            continue
        if mount.state in WANTED:
            action = _wanted(mount, held=held, proven=proven, served=served, failed=failed, said=said.get(adapter_id))
        else:
            action = _unwanted(mount, held=held, served=served, said=said.get(adapter_id))
        if action is not None:
            steps = leaving if action in (Action.DRAIN, Action.REMOVE) else coming
            steps.append(Step(action=action, adapter_id=adapter_id, mount=mount))
    for adapter_id in sorted((held | served) - busy - mounts.keys()):
        leaving.append(Step(action=Action.REMOVE, adapter_id=adapter_id))
    return leaving + coming


def _wanted(mount: Mount, *, held: Set[str], proven: Set[str], served: Set[str], failed: Set[str], said: Action | None) -> Action | None:
    adapter_id = mount.adapter_id
    if adapter_id in held and (adapter_id not in proven or adapter_id in failed):
        return Action.REMOVE  # a load that failed half-way is never served
    if adapter_id in failed:
        return None if said is Action.SAY_FAILED else Action.SAY_FAILED
    if adapter_id not in held:
        return Action.LOAD
    if adapter_id not in served:
        return Action.SERVE
    if mount.state is AdapterState.LOADING and said is not Action.SAY_LOADED:
        return Action.SAY_LOADED
    return None


def _unwanted(mount: Mount, *, held: Set[str], served: Set[str], said: Action | None) -> Action | None:
    if mount.state is AdapterState.DRAINING:
        if mount.adapter_id in held or mount.adapter_id in served:
            return Action.DRAIN
        return None if said is Action.SAY_DRAINED else Action.SAY_DRAINED
    return Action.REMOVE if mount.adapter_id in held or mount.adapter_id in served else None
