"""Runs in vLLM's worker process (its `worker_extension_cls`): adapters mounted from the host tier by a thread, the engine stepping on.

The thread copies on a stream of its own into a slot that no request names yet; only the moment in which the slot gets its adapter's
id belongs to the engine's loop. Everything else about slots is lora_kernels' WorkerInspection.
"""

# pyright: basic, reportMissingImports=false

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from lora_kernels.vllm_plugin.inspect import WorkerInspection

from services.worker import vllm_memory
from services.worker.engine_image import PIECE_BYTES, Form, Part, SlotLayout, place
from services.worker.vllm_blocks import zero_new_blocks
from services.worker.vllm_step_timer import StepTimer

GROUP_BYTES = 16 << 20
"""Handed to the device in one call, with one more on its way: the engine's own transfers wait behind a piece, not behind a group."""

zero_new_blocks()  # this module is imported before the cache is made

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_EXPERT_STACKS = (("w13_lora_a_stacked", "A"), ("w13_lora_b_stacked", "B"), ("w2_lora_a_stacked", "A"), ("w2_lora_b_stacked", "B"))


class WorkerExtension(WorkerInspection):
    """Methods mixed into vLLM's worker class; called by name with `collective_rpc`, answered with plain values."""

    _tenantry_loader: "SlotLoader | None" = None
    _tenantry_watch: "vllm_memory.MemoryWatch | None" = None
    _tenantry_timer: StepTimer | None = None

    def tenantry_layout(self, names: list[str]) -> dict[str, Any]:
        """What a slot is made of. `names`: the adapters' modules by the names that their files use.

        `unsupported` says why slots of this engine are not mounted from images.
        """
        try:
            parts, dtype = _parts(self.model_runner.lora_manager._adapter_manager, names)
        except _Unsupported as error:
            return {"unsupported": str(error)}
        layout = place(dtype, self.model_runner.lora_manager._adapter_manager.lora_config.max_lora_rank, [part for part, _ in parts])
        self._tenantry_loader = SlotLoader(self, layout, [stack for _, stack in parts])
        return {"layout": msgspec.to_builtins(layout)}

    def tenantry_open_host_tier(self, path: str, images: int) -> dict[str, Any]:
        return _loader(self).open(path, images)

    def tenantry_begin_mount(self, lora_int_id: int, image: int, rank: int, modules: list[str], sums: list[int]) -> int:
        """Starts the copy; the slot that it goes to."""
        return _loader(self).begin_mount(lora_int_id, image, rank, modules, sums)

    def tenantry_end_mount(self, lora_int_id: int) -> dict[str, Any]:
        """`state`: copying | mounted | failed. Once it is mounted, requests may name it."""
        return _loader(self).end_mount(lora_int_id)

    def tenantry_begin_release(self, lora_int_id: int) -> dict[str, Any]:
        """Takes the adapter out of its slot, or a mount back, and starts zeroing the slot. `state`: copying | zeroing | absent."""
        return _loader(self).begin_release(lora_int_id)

    def tenantry_end_release(self, slot: int) -> dict[str, Any]:
        """`state`: zeroing | zero | failed."""
        return _loader(self).end_release(slot)

    def tenantry_slot_sums(self, slot: int) -> list[int]:
        """Checksums of what the slot holds, as its image's; the engine waits for them."""
        return _loader(self).sums(slot)

    def tenantry_time_steps(self) -> None:
        """From now on every step's times come back with its output."""
        if self._tenantry_timer is None:
            self._tenantry_timer = StepTimer(self.model_runner, self.device)

    def tenantry_memory(self) -> dict[str, Any]:
        """The latest of one measurement a second."""
        if self._tenantry_watch is None:
            self._tenantry_watch = vllm_memory.MemoryWatch(self)
        return self._tenantry_watch.latest


class _Unsupported(Exception):
    pass


class _Job:
    """What the thread does; the engine's loop reads it when it is done."""

    def __init__(self, slot: int, rank: int, modules: Sequence[str], expected: list[int]) -> None:
        self.slot = slot
        self.rank = rank
        self.modules = frozenset(modules)
        self.expected = expected
        self.sums: list[int] = []
        self.error = ""
        self.copy_ms = 0.0
        self.done = threading.Event()


class SlotLoader:
    """One mount or release at a time. Called from the engine's loop; `_run` alone is the thread's."""

    def __init__(self, worker: Any, layout: SlotLayout, stacks: list[torch.Tensor]) -> None:
        self._worker = worker
        self._manager = worker.model_runner.lora_manager._adapter_manager
        self._layout = layout
        self._stacks = stacks
        self._device = stacks[0].device
        self._stream: Any = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._images: torch.Tensor | None = None
        self._mounts: dict[int, _Job] = {}
        self._releases: dict[int, _Job] = {}

    def open(self, path: str, images: int) -> dict[str, Any]:
        size = self._layout.image_bytes * images
        descriptor = os.open(path, os.O_RDWR)
        try:
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._images = torch.from_numpy(np.frombuffer(memory, np.uint8)).view(images, self._layout.image_bytes)
        started_s = time.monotonic()
        is_pinned = self._stream is not None and _pin(self._images)
        return {"pinned": is_pinned, "pin_ms": (time.monotonic() - started_s) * 1000.0, "bytes": size}

    def begin_mount(self, lora_int_id: int, image: int, rank: int, modules: list[str], sums: list[int]) -> int:
        assert self._images is not None
        free = [index for index, held in enumerate(self._manager.lora_index_to_id) if held is None]
        if not free:
            raise RuntimeError("no free slot")
        slot = free[0]
        self._manager.lora_index_to_id[slot] = lora_int_id  # taken; nothing names the id before it is registered
        source = self._images[image]
        job = self._mounts[lora_int_id] = _Job(slot, rank, modules, sums)
        self._start(job, lambda: self._copy(source, job.slot))
        return slot

    def end_mount(self, lora_int_id: int) -> dict[str, Any]:
        job = self._mounts[lora_int_id]
        if not job.done.is_set():
            return {"state": "copying"}
        if not job.error and job.sums != job.expected:
            wrong = sum(1 for got, expected in zip(job.sums, job.expected, strict=False) if got != expected)
            job.error = f"{wrong} of {len(job.expected)} checksums of the slot differ from its image's"
        if job.error:
            return {"state": "failed", "message": job.error}
        del self._mounts[lora_int_id]
        started_s = time.monotonic()
        self._enable(job.slot, job.modules)
        self._register(lora_int_id, job)
        return {"state": "mounted", "copy_ms": job.copy_ms, "register_ms": (time.monotonic() - started_s) * 1000.0}

    def begin_release(self, lora_int_id: int) -> dict[str, Any]:
        job = self._mounts.get(lora_int_id)
        if job is not None and not job.done.is_set():
            return {"state": "copying"}
        self._mounts.pop(lora_int_id, None)
        if lora_int_id not in self._manager.lora_index_to_id:
            self._worker.remove_lora(lora_int_id)
            return {"state": "absent"}
        slot = self._manager.lora_index_to_id.index(lora_int_id)
        # Nobody's until it is zero; first, so that nothing that comes with the removal zeroes it in the engine's loop.
        self._manager.lora_index_to_id[slot] = -lora_int_id
        self._worker.remove_lora(lora_int_id)
        self._enable(slot, frozenset())
        job = self._releases[slot] = _Job(slot, 0, (), [])
        self._start(job, lambda: self._zero(slot))
        return {"state": "zeroing", "slot": slot}

    def end_release(self, slot: int) -> dict[str, Any]:
        job = self._releases[slot]
        if not job.done.is_set():
            return {"state": "zeroing"}
        del self._releases[slot]
        if job.error or any(job.sums):
            return {"state": "failed", "message": job.error or "the slot is not zero"}
        self._manager.lora_index_to_id[slot] = None
        return {"state": "zero"}

    def sums(self, slot: int) -> list[int]:
        return _sums(self._slot(slot))

    def _start(self, job: _Job, work: Callable[[], list[int]]) -> None:
        threading.Thread(target=self._run, args=(job, work), name="tenantry-slots", daemon=True).start()

    def _run(self, job: _Job, work: Callable[[], list[int]]) -> None:
        started_s = time.monotonic()
        try:
            if self._stream is not None:
                torch.cuda.set_device(self._device)
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                job.sums = work()
        except Exception as error:  # noqa: BLE001  told to whoever asks for the job's end
            job.error = f"{type(error).__name__}: {error}"
        job.copy_ms = (time.monotonic() - started_s) * 1000.0
        job.done.set()

    def _copy(self, source: torch.Tensor, slot: int) -> list[int]:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for part, target in zip(self._layout.parts, self._slot(slot), strict=True):
            targets.extend(target.split(PIECE_BYTES))
            sources.extend(source[part.offset : part.offset + target.numel()].split(PIECE_BYTES))
        group_ends = [self._mark()]
        first = 0
        while first < len(targets):
            last, size_bytes = first, 0
            while last < len(targets) and size_bytes < GROUP_BYTES:
                size_bytes += targets[last].numel()
                last += 1
            # One call for many pieces: it runs without the interpreter's lock.
            torch._foreach_copy_(targets[first:last], sources[first:last], non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]
            group_ends.append(self._mark())
            _wait(group_ends[-2])  # the next group is on its way while this one is waited for
            first = last
        _wait(group_ends[-1])
        return _sums(self._slot(slot))

    def _zero(self, slot: int) -> list[int]:
        words = [target.view(torch.int32) for target in self._slot(slot)]
        torch._foreach_zero_(words)  # pyright: ignore[reportPrivateImportUsage]
        _wait(self._mark())
        return [int(found) for found in torch.stack([target.any() for target in words]).cpu()]

    def _mark(self) -> Any:
        """What the stream has to do up to here; None where there is no stream."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def _slot(self, slot: int) -> list[torch.Tensor]:
        """The slot's tensors as bytes."""
        return [stack[slot].view(-1).view(torch.uint8) for stack in self._stacks]

    def _enable(self, slot: int, modules: frozenset[str]) -> None:
        """Experts' layers look only at adapters that change them."""
        for name, module in self._manager.modules.items():
            enabled = getattr(module, "adapter_enabled", None)
            if enabled is not None:
                enabled[slot] = int(name in modules)

    def _register(self, lora_int_id: int, job: _Job) -> None:
        """As if vLLM had loaded and activated it; pinned, so that it never does so itself (it would find no weights)."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        nothing = torch.empty(0)
        loras = {name: LoRALayerWeights(name, job.rank, job.rank, nothing, nothing, 1.0) for name in job.modules}
        self._manager._registered_adapters[lora_int_id] = LoRAModel(lora_int_id, job.rank, loras)
        self._manager._active_adapters[lora_int_id] = None
        self._manager.pin_adapter(lora_int_id)


def _wait(event: Any) -> None:
    if event is not None:
        event.synchronize()


def _sums(parts: list[torch.Tensor]) -> list[int]:
    """As engine_image.sums_of, of every part."""
    sums: list[torch.Tensor] = []
    step = PIECE_BYTES // 4
    for part in parts:
        words = part.view(torch.int32)
        whole = words.numel() // step
        if whole:
            sums.append(words[: whole * step].view(whole, step).sum(1, dtype=torch.int64))
        if words.numel() > whole * step:
            sums.append(words[whole * step :].sum(dtype=torch.int64).view(1))
    return torch.cat(sums).tolist()


def _parts(manager: Any, names: list[str]) -> tuple[list[tuple[Part, torch.Tensor]], str]:
    """:raises _Unsupported: a layer whose slots are not known to be what an image of them says."""
    known = _names_in_files(manager, names)
    parts: list[tuple[Part, torch.Tensor]] = []
    dtype = _DTYPES.get(manager.lora_config.lora_dtype)
    if dtype is None:
        raise _Unsupported(f"slots of {manager.lora_config.lora_dtype}")
    if manager.lora_config.fully_sharded_loras:
        raise _Unsupported("fully sharded adapters")
    for name, module in manager.modules.items():
        if getattr(module, "tp_size", 1) != 1:
            raise _Unsupported("slots spread over several GPUs")
        if not type(module).set_lora.__module__.startswith("vllm.lora.layers"):
            raise _Unsupported(f"{name} has another way to set an adapter ({type(module).__name__})")
        for side, form, sources, stack in _stacks(manager, name, module):
            missing = [source for source in sources if source not in known]
            if missing:
                raise _Unsupported(f"{missing[0]} is no module of the base's description")
            shape = (int(stack.shape[1]), int(stack.shape[2]), int(stack.shape[3]))
            if not stack[0].is_contiguous() or stack[0].numel() * stack.element_size() % 4:
                raise _Unsupported(f"{name} has slots that are not whole words in a row")
            if form is Form.EXPERTS and shape[0] != len(sources):
                raise _Unsupported(f"{name} has slots for {shape[0]} of {len(sources)} experts")
            part = Part(module=name, side=side, form=form, shape=shape, sources=tuple(known[source] for source in sources))
            parts.append((part, stack))
    return parts, dtype


def _stacks(manager: Any, name: str, module: Any) -> list[tuple[str, Form, list[str], torch.Tensor]]:
    """(side, form, the engine's names of what goes in, tensor) for each tensor of the layer's slots."""
    packed: list[str] = manager.packed_modules.get(name, [])
    kind = type(module).__name__
    found: list[tuple[str, Form, list[str], torch.Tensor]] = []
    if kind == "FusedMoE3DWithLoRA":
        for stacks, side in _EXPERT_STACKS:
            source = f"{name}.base_layer" if stacks.startswith("w13") else name
            found.extend((side, Form.FUSED, [source], stack) for stack in getattr(module, stacks))
    elif kind == "FusedMoEWithLoRA":
        if len(packed) % 3 or module._w13_slices != 2 or getattr(module, "enable_moe_shared_loras", False):
            raise _Unsupported(f"{name} has experts without gates, or ones that share weights")
        gate, down, up = packed[0::3], packed[1::3], packed[2::3]
        for stacks, side in _EXPERT_STACKS:
            sources = [gate, up] if stacks.startswith("w13") else [down]
            found.extend((side, Form.EXPERTS, names, stack) for names, stack in zip(sources, getattr(module, stacks), strict=True))
    elif isinstance(getattr(module, "lora_a_stacked", None), tuple) and kind.endswith("LinearWithLoRA"):
        sources = packed or [name]
        if len(sources) != module.n_slices:
            raise _Unsupported(f"{name} has {module.n_slices} slices for {len(sources)} modules")
        for side, stacks in (("A", module.lora_a_stacked), ("B", module.lora_b_stacked)):
            found.extend((side, Form.PLAIN, [source], stack) for source, stack in zip(sources, stacks, strict=True))
    else:
        raise _Unsupported(f"{name} is a {kind}")
    return found


def _names_in_files(manager: Any, names: list[str]) -> dict[str, str]:
    """The engine's name of each module -> the files'."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    for renames_only in ("get_rename_mapper", "get_unstacked_mapper"):  # 0.32, 0.26
        if mapper is not None and hasattr(mapper, renames_only):
            mapper = getattr(mapper, renames_only)()
            break
    return {parse_fine_tuned_lora_name(f"base_model.model.{name}.lora_A.weight", mapper)[0]: name for name in names}


def _pin(memory: torch.Tensor) -> bool:
    """Registers the pages with the driver; blocking, a second for a few gigabytes. False: copies will be slower."""
    cudart = torch.cuda.cudart()
    return cudart is not None and int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0


def _loader(worker: WorkerExtension) -> SlotLoader:
    if worker._tenantry_loader is None:
        raise RuntimeError("tenantry_layout was not called, or not supported")
    return worker._tenantry_loader
