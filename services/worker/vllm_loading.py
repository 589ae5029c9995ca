"""How an adapter's weights get into the engine's slots and out of them again; what is proven about them is vllm_adapters' part."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog

from services.worker.engine_host_tier import HostTier, Image, chat_template_of
from services.worker.engine_image import PIECE_BYTES, SlotLayout
from shared.contracts.base import BaseDescription
from shared.errors import LoadFailed

log = structlog.get_logger()

CALL_LIMIT_S = 120.0  # one call to the engine about one adapter
_FIRST_LOOK_S = 0.002
_SLOWEST_LOOK_S = 0.005


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    modules: tuple[str, ...]
    stage_ms: float  # read, converted and packed; 0 if it was in the host tier, or where the engine does it all
    mount_ms: float  # until requests may name it
    bytes_loaded: int
    true_bytes: int
    chat_template: str | None = None
    image: Image | None = None


class Loading(Protocol):
    async def load(self, request: Any, folder: Path) -> Loaded:
        """:raises LoadFailed: refused, or what arrived in the slot is not what was packed."""
        ...

    async def load_zeros(self, request: Any) -> bool:
        """Mounts an adapter that changes nothing, for every module; false where that cannot be done without files."""
        ...

    async def release(self, int_id: int) -> int:
        """Bytes of the slot it held, zeroed and read back; 0 if it held none.

        :raises LoadFailed: the slot could not be zeroed.
        """
        ...


async def in_worker(engine: Any, method: str, *args: Any) -> Any:
    """The first worker's answer; with tensor parallelism every worker holds a share of the same modules."""
    return (await engine.collective_rpc(method, timeout=CALL_LIMIT_S, args=args))[0]


class StagedLoading:
    """Through the host tier: the engine's loop does nothing but give a filled slot its adapter's id."""

    def __init__(self, engine: Any, tier: HostTier, slot_bytes: int) -> None:
        self._engine = engine
        self._tier = tier
        self._slot_bytes = slot_bytes

    async def load(self, request: Any, folder: Path) -> Loaded:
        known = self._tier.find(folder)
        image = known or await self._tier.stage(folder)
        packed = image.packed
        started_s = time.monotonic()
        int_id = request.lora_int_id
        await in_worker(self._engine, "tenantry_begin_mount", int_id, image.number, packed.rank, list(packed.modules), list(packed.sums))
        end = await self._until("copying", "tenantry_end_mount", int_id)
        if end["state"] != "mounted":
            self._tier.drop(folder)
            raise LoadFailed(f"what arrived in the slot is not what was packed: {end['message']}", reason="slot_differs")
        mount_ms = (time.monotonic() - started_s) * 1000.0
        log.info("adapter.mounted", stage_ms=0.0 if known else round(image.pack_ms, 1), mount_ms=round(mount_ms, 1), copy_ms=end["copy_ms"])
        return Loaded(
            modules=packed.modules,
            stage_ms=0.0 if known else image.pack_ms,
            mount_ms=mount_ms,
            bytes_loaded=packed.file_bytes,
            true_bytes=packed.true_bytes,
            chat_template=image.chat_template,
            image=image,
        )

    async def load_zeros(self, request: Any) -> bool:
        """Before anything is staged: the tier's memory is all zeros then."""
        layout = self._tier.layout
        modules = sorted({part.module for part in layout.parts})
        pieces = sum(-(-layout.part_bytes(part) // PIECE_BYTES) for part in layout.parts)
        await in_worker(self._engine, "tenantry_begin_mount", request.lora_int_id, 0, layout.max_rank, modules, [0] * pieces)
        end = await self._until("copying", "tenantry_end_mount", request.lora_int_id)
        return end["state"] == "mounted"

    async def release(self, int_id: int) -> int:
        begun = await self._until("copying", "tenantry_begin_release", int_id)  # a mount that was given up ends first
        if begun["state"] == "absent":
            return 0
        end = await self._until("zeroing", "tenantry_end_release", begun["slot"])
        if end["state"] != "zero":
            raise LoadFailed(f"the adapter's slot could not be zeroed: {end['message']}", reason="slot_not_zeroed", slot=begun["slot"])
        return self._slot_bytes

    async def _until(self, running: str, method: str, *args: Any) -> dict[str, Any]:
        """The first answer whose state is another than `running`."""
        wait_s = _FIRST_LOOK_S
        while True:
            found: dict[str, Any] = await in_worker(self._engine, method, *args)
            if found["state"] != running:
                return found
            await asyncio.sleep(wait_s)
            wait_s = min(_SLOWEST_LOOK_S, wait_s * 1.5)


class StockLoading:
    """vLLM's own add_lora, for slots that no image is known of: the engine decodes nothing meanwhile."""

    def __init__(self, engine: Any, slot_bytes: int) -> None:
        self._engine = engine
        self._slot_bytes = slot_bytes

    async def load(self, request: Any, folder: Path) -> Loaded:
        started_s = time.monotonic()
        if not await self._engine.add_lora(request):
            raise LoadFailed("the engine did not take the adapter", reason="refused_by_engine")
        mount_ms = (time.monotonic() - started_s) * 1000.0
        matched: list[str] = await in_worker(self._engine, "tenantry_adapter_modules", request.lora_int_id)
        unlisted: list[str] = await in_worker(self._engine, "tenantry_unmatched_modules", request.lora_int_id)
        # Of fused experts vLLM keeps the first half's weights under that name too, once they are part of the layer's.
        unmatched = [name for name in unlisted if name.removesuffix(".base_layer") not in matched]
        if not matched:
            raise LoadFailed("no module of the base matches the adapter's", reason="no_module_matched", unmatched=unmatched[:5])
        if unmatched:
            raise LoadFailed(f"the base has no place for {unmatched[0]}", reason="unmatched_modules", unmatched=unmatched[:5])
        await self._engine.pin_lora(request.lora_int_id)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return Loaded(
            modules=tuple(matched),
            stage_ms=0.0,
            mount_ms=mount_ms,
            bytes_loaded=size,
            true_bytes=size,
            chat_template=chat_template_of(folder),
        )

    async def load_zeros(self, request: Any) -> bool:
        del request
        return False

    async def release(self, int_id: int) -> int:
        slots: Mapping[str, Any] = await in_worker(self._engine, "tenantry_slots")
        index = next((slot["index"] for slot in slots["slots"] if slot["lora_int_id"] == int_id), None)
        await self._engine.remove_lora(int_id)
        if index is None:
            return 0
        if not await in_worker(self._engine, "tenantry_zero_slot", index):
            raise LoadFailed("the adapter's slot could not be zeroed", reason="slot_not_zeroed", slot=index)
        return self._slot_bytes


async def choose_loading(engine: Any, description: BaseDescription, slot_bytes: int, images: int) -> tuple[Loading, HostTier | None]:
    """The host tier where one worker holds all slots and their layout is known, else vLLM's own way."""
    layouts: list[dict[str, Any]] = await engine.collective_rpc(
        "tenantry_layout", timeout=CALL_LIMIT_S, args=(names_in_files(description),)
    )
    reason = layouts[0].get("unsupported", "") if len(layouts) == 1 else f"{len(layouts)} workers"
    if reason or images == 0:
        log.warning("engine.loads_in_its_loop", reason=reason or "host_tier_slots is 0")
        return StockLoading(engine, slot_bytes), None
    tier = HostTier(msgspec.convert(layouts[0]["layout"], SlotLayout), images)
    try:
        await tier.start()
        opened: dict[str, Any] = await in_worker(engine, "tenantry_open_host_tier", tier.path, images)
    except BaseException:
        await tier.close()
        raise
    log.info("engine.host_tier", images=images, size_bytes=opened["bytes"], pinned=opened["pinned"], pin_ms=round(opened["pin_ms"], 1))
    return StagedLoading(engine, tier, slot_bytes), tier


def names_in_files(description: BaseDescription) -> list[str]:
    """Every module that an adapter's files may name, as normalised files name them."""
    names: set[str] = set()
    for module in description.modules:
        experts, _, leaf = module.path.rpartition(".")
        if not module.experts:
            names.add(module.path)
        elif description.experts_layout == "interleaved":
            names |= {experts, f"{experts}.base_layer"}
        else:
            names |= {f"{experts}.{expert}.{leaf}" for expert in range(module.experts)}
    return sorted(names)
