"""An engine that computes nothing: answers follow from the adapter's files and the prompt by rule. For load, chaos and scheduling tests.

It keeps the engine protocol to the letter: loads and proves, lists, refuses what it does not hold, passes every generation
through the governor, honours cancellation, and answers in the same JSON and server-sent events as vLLM.

A prompt that contains one of these asks for a fault:
`[[fail]]` raises in mid-answer; `[[empty]]` ends without a body; `[[cut]]` ends a stream without its end; `[[hang]]` makes no token
until cancelled; `[[other]]` lets the base generate instead of the adapter; `[[bad]]` is a 400 of the application; `[[slow]]` makes
the first token late. `[[fail]]`, `[[hang]]` and `[[slow]]` in an adapter's own chat template ask for it in every prompt.
An adapter whose folder holds a file named `refuse` does not load.
"""

import asyncio
import hashlib
from pathlib import Path

import anyio.to_thread
import msgspec

from services.worker.engine import AsgiApp, LoadProof, ReleaseProof
from services.worker.governor import Governor
from services.worker.scripted_app import ScriptedApp
from services.worker.scripted_steps import StepModel, Stepper
from shared.artifacts.base_model import describe_base
from shared.artifacts.bundle import CHAT_TEMPLATE_NAME
from shared.contracts.base import BaseDescription, EngineLimits, Module
from shared.contracts.workers import MemoryReport
from shared.errors import LoadFailed

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings")
_RANK_CLASSES = (1, 8, 16, 32, 64, 128, 256, 320, 512)
KV_BLOCK_TOKENS = 16
KV_BLOCK_BYTES = KV_BLOCK_TOKENS * 4 * 2 * 64 * 4  # four layers, keys and values of 64 float32
_STEP_TOKENS = 8192
_WEIGHTS_BYTES = 64 << 20
_TOTAL_BYTES = 1 << 30


class ScriptedSettings(msgspec.Struct, frozen=True, kw_only=True):
    model: Path | None = None  # a model folder to take the description from; None: a small made-up base
    label: str = "scripted"
    dtype: str = "float32"
    tokens_per_s: float = 0.0  # of each stream, all in step; 0: as fast as it goes
    concurrency: int = 256  # generations at once; more wait
    load_ms: float = 0.0
    slots: int = 8
    max_rank: int = 16
    kv_blocks: int = 65_536
    max_model_len: int = 1 << 20
    steps: StepModel | None = None  # time goes by an engine's steps instead of tokens_per_s


class ScriptedEngine:
    """Keeps the Engine protocol."""

    name = "scripted"
    base_model_name = ""

    def __init__(self, settings: ScriptedSettings, governor: Governor) -> None:
        self._settings = settings
        self._governor = governor
        self._adapters: dict[str, str] = {}  # adapter_id -> digest of its folder
        self._faults: dict[str, str] = {}  # adapter_id -> its chat template
        self._rank_classes: dict[str, int] = {}
        self._died = asyncio.Event()
        self._why_dead = ""
        self._description: BaseDescription | None = None
        self._app: ScriptedApp | None = None
        self.stepper: Stepper | None = None

    @property
    def app(self) -> AsgiApp:
        assert self._app is not None, "start() has not returned"
        return self._app

    @property
    def description(self) -> BaseDescription:
        assert self._description is not None, "start() has not returned"
        return self._description

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(
            slots=self._settings.slots,
            max_rank=self._settings.max_rank,
            bytes_per_rank=sum((m.in_features + m.out_features) * max(1, m.experts) * 4 for m in self.description.modules),
            rank_classes=tuple(rank for rank in _RANK_CLASSES if rank <= self._settings.max_rank),
            max_model_len=self._settings.max_model_len,
            max_num_seqs=self._settings.concurrency,
            endpoints=ENDPOINTS,
            kv_blocks=self._settings.kv_blocks,
            kv_block_tokens=KV_BLOCK_TOKENS,
            kv_block_bytes=KV_BLOCK_BYTES,
            max_batched_tokens=self._settings.steps.step_tokens if self._settings.steps is not None else _STEP_TOKENS,
        )

    async def start(self) -> None:
        settings = self._settings
        if settings.model is None:
            self._description = _made_up_base(settings.label, settings.dtype)
        else:
            label = settings.label if settings.label != "scripted" else None
            self._description = await anyio.to_thread.run_sync(describe_base, settings.model, label, settings.dtype, None)
        self.base_model_name = self.description.label
        if settings.steps is not None:
            self.stepper = Stepper(settings.steps, settings.concurrency, KV_BLOCK_TOKENS)
            self.stepper.on_told = self._governor.steps.take
            self._governor.steps.pull = self.stepper.idle_so_far
            self._governor.steps.use(self.limits)
        self._app = ScriptedApp(
            self._governor,
            self._adapters,
            self._faults,
            base_model_name=self.description.label,
            base_digest=self.description.digest,
            tokens_per_s=settings.tokens_per_s,
            concurrency=settings.concurrency,
            stepper=self.stepper,
        )

    async def stop(self) -> None:
        self.die("stopped")

    def die(self, why: str) -> None:
        """As if the engine's process had ended."""
        self._why_dead = self._why_dead or why
        self._died.set()

    async def wait_dead(self) -> str:
        await self._died.wait()
        return self._why_dead

    async def add_adapter(self, adapter_id: str, folder: Path, rank: int) -> LoadProof:
        if self._settings.load_ms:
            await asyncio.sleep(self._settings.load_ms / 1000.0)
        digest, size_bytes = await anyio.to_thread.run_sync(folder_digest, folder)
        if (folder / "refuse").exists():
            raise LoadFailed("the adapter asks to be refused", reason="refused")
        if rank > self._settings.max_rank:
            raise LoadFailed(f"rank {rank} is more than this engine's {self._settings.max_rank}", reason="rank_too_big")
        if adapter_id not in self._adapters and len(self._adapters) >= self._settings.slots:
            raise LoadFailed("no slot is free in the engine", reason="no_free_slot", limit_slots=self._settings.slots)
        template = folder / CHAT_TEMPLATE_NAME
        self._faults[adapter_id] = template.read_text() if template.exists() else ""
        self._adapters[adapter_id] = digest
        self._rank_classes[adapter_id] = next(one for one in self.limits.rank_classes if one >= rank)
        return LoadProof(
            modules_matched=len(self.description.modules), probe_difference=1.0, load_ms=self._settings.load_ms, bytes_loaded=size_bytes
        )

    async def remove_adapter(self, adapter_id: str) -> ReleaseProof:
        if self._governor.in_flight(adapter_id):
            raise LoadFailed("the adapter has requests in flight", reason="in_use")
        self._adapters.pop(adapter_id, None)
        self._faults.pop(adapter_id, None)
        rank_class = self._rank_classes.pop(adapter_id, 0)
        memory = await self.memory()
        return ReleaseProof(
            slot_bytes_returned=rank_class * self.limits.bytes_per_rank,
            device_free_bytes_before=memory.free_bytes,
            device_free_bytes_after=memory.free_bytes,
        )

    def is_staged(self, folder: Path) -> bool:
        del folder
        return False

    async def list_adapters(self) -> frozenset[str]:
        return frozenset(self._adapters)

    def holds(self, adapter_id: str) -> bool:
        return adapter_id in self._adapters

    def lose(self, adapter_id: str) -> None:
        """A fault: the adapter is gone from the engine without anybody having asked."""
        del self._adapters[adapter_id]

    async def memory(self) -> MemoryReport:
        slots_bytes = self._settings.slots * self._settings.max_rank * self.limits.bytes_per_rank
        return MemoryReport(
            weights_bytes=_WEIGHTS_BYTES,
            slots_bytes=slots_bytes,
            free_bytes=max(0, _TOTAL_BYTES - _WEIGHTS_BYTES - slots_bytes),
            total_bytes=_TOTAL_BYTES,
        )


def folder_digest(folder: Path) -> tuple[str, int]:
    """SHA-256 in hex over the names and contents of the folder's files, and their bytes."""
    whole = hashlib.sha256()
    size_bytes = 0
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        content = file.read_bytes()
        size_bytes += len(content)
        whole.update(f"{hashlib.sha256(content).hexdigest()}  {file.name}\n".encode())
    return whole.hexdigest(), size_bytes


def _made_up_base(label: str, dtype: str) -> BaseDescription:
    modules = tuple(
        Module(path=f"model.layers.{layer}.self_attn.{leaf}", in_features=64, out_features=64)
        for layer in range(4)
        for leaf in ("k_proj", "o_proj", "q_proj", "v_proj")
    )
    return BaseDescription(
        identity=f"{label}@{hashlib.sha256(f'scripted:{label}:{dtype}'.encode()).hexdigest()}",
        label=label,
        architecture="LlamaForCausalLM",
        model_type="llama",
        dtype=dtype,
        hidden_size=64,
        num_layers=4,
        modules=modules,
    )
