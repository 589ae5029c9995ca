"""What one LoRA path of a real vLLM answers for a small model of real layer shapes: a program, one process an engine.

`python vllm_answers.py FOLDER CASE MODE` under TENANTRY_KERNELS=off or on; writes FOLDER/<CASE>-<MODE>-<off or on>.json after each stage.
Weights and adapters are the same for both paths. Each adapter's own answers are also asked of the base with it merged.
"""

import contextlib
import fcntl
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import vllm_models as models
from vllm_compare import Answer, Request, ask

FULL = {"a0": 32, "a1": 8, "a2": 16}
"""Ranks by name, in slots of rank 32, of adapters of every layer."""
ATTENTION_ONLY = {"b3": 4, "b4": 8, "b5": 16, "b6": 32}
ROUTER = "r7"
"""Of attention and the router: vLLM's own path loads and ignores router weights, so it is compared with merged weights only."""
RANKS = FULL | ATTENTION_ONLY | {ROUTER: 8}
NUM_TOKENS = 12
PROMPTS = tuple(tuple((7 * i + 3 * j * j + 11 * j + 1) % (models.VOCAB - 1) + 1 for j in range(n)) for i, n in enumerate((11, 17, 40, 13)))
"""Longer than a batch has requests: vLLM's own path writes beyond the logits of a shorter prompt whose log-probabilities are asked for."""
SHORT = tuple(prompt[:3] for prompt in PROMPTS * 2)
LONG = tuple(tuple((7 * j * j + 13 * j + i) % (models.VOCAB - 1) + 1 for j in range(400)) for i in range(4))

ALL_BASE = [Request(prompt=prompt) for prompt in PROMPTS * 2]
LONG_BASE = [Request(prompt=prompt) for prompt in LONG]
BATCHES: dict[str, list[Request]] = {
    "base beside base": ALL_BASE,
    "long base": LONG_BASE,
    "base beside adapters": ALL_BASE[:4] + [replace(r, adapter=name) for r, name in zip(ALL_BASE[4:], [*FULL, "b6"], strict=True)],
    "every slot": [Request(prompt=PROMPTS[1], adapter=name) for name in (None, *FULL, *ATTENTION_ONLY)],
    "prefill": [replace(r, adapter=name) for r, name in zip(LONG_BASE, (None, *FULL), strict=True)],
    "one": [Request(prompt=PROMPTS[1], adapter="a1")],
    **{name: [Request(prompt=prompt, adapter=name) for prompt in PROMPTS] for name in FULL},
}
"""By name, each asked in one batch."""
SHORT_BATCHES = {
    "short base": [Request(prompt=prompt) for prompt in SHORT],
    "short beside adapters": [replace(r, prompt=prompt) for r, prompt in zip(BATCHES["base beside adapters"], SHORT, strict=True)],
}
"""Of our path only."""


class Program:
    def __init__(self, folder: Path, case: str, mode: str) -> None:
        self.folder, self.case, self.mode = folder, models.CASES[case], mode
        self.path = os.environ["TENANTRY_KERNELS"]
        self.file = folder / f"{case}-{mode}-{self.path}.json"
        self.started_s = time.monotonic()
        self.document: dict[str, Any] = {"answers": {}, "errors": {}, "seconds": {}}

    def stage(self, name: str, work: Callable[[], None]) -> None:
        """Runs one stage and writes the document; what fails is in it, and other stages go on."""
        try:
            work()
        except Exception:
            self.document["errors"][name] = traceback.format_exc()[-3000:]
        self.document["seconds"][name] = round(time.monotonic() - self.started_s, 1)
        self.file.write_text(json.dumps(self.document))

    def run(self) -> None:
        from lora_kernels.vllm_plugin import register, status

        register()
        self.document["status"] = asdict(status())
        compiled = _watch_compilations()
        self.stage("start", self.start)
        self.stage("base with no adapter mounted", self.before_mounting)
        self.stage("mount", self.mount)
        if self.path == "on" and self.mode != "eager":
            self.stage("warm-up", self.warm_up)
        compiled.clear()
        for batch, requests in (BATCHES | SHORT_BATCHES if self.path == "on" else BATCHES).items():
            self.stage(batch, lambda batch=batch, requests=requests: self.answer(batch, requests))
        self.stage("again", lambda: self.answer("again", BATCHES["base beside adapters"]))
        self.document["compiled_in_requests"] = sorted(set(compiled) & _our_kernels())
        if self.path == "on":
            self.stage("inspection", self.inspect)
            if self.case.can_merge:
                self.stage("merged", self.merged)
            if self.mode == "eager":
                self.stage("warm-up", self.warm_up)
        print(json.dumps(self.document["seconds"]), flush=True)

    def start(self) -> None:
        import vllm.model_executor.models.registry as registry
        from vllm import LLM

        registry._run_in_subprocess = lambda inspect: inspect()  # the import of vLLM once more, only to look at a class
        eager = {"enforce_eager": True}
        graphs = {"compilation_config": {"cudagraph_capture_sizes": [1, 8, 16]}}
        self.llm = LLM(
            model=str(models.write_model(self.file.with_suffix(""), self.case.model)),
            load_format="dummy",
            skip_tokenizer_init=True,
            seed=0,
            max_model_len=1024,
            max_num_seqs=16,
            max_num_batched_tokens=4096,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=1 << 29,
            enable_prefix_caching=False,
            disable_log_stats=True,
            enable_lora=True,
            max_loras=len(RANKS),
            max_lora_rank=32,
            worker_extension_cls="vllm_worker.MergingWorker",
            tensor_parallel_size=2 if self.mode == "tp2" else 1,
            moe_backend=self.case.moe_backend[self.path],
            **(eager if self.mode == "eager" else graphs),
        )
        workers = self.llm.collective_rpc("tenantry_plugin")
        self.document["workers"] = workers

    def before_mounting(self) -> None:
        unmounted = {"base beside base": ALL_BASE, "long base": LONG_BASE}
        self.document["unmounted"] = {name: _plain(self.ask(requests)) for name, requests in unmounted.items()}

    def mount(self) -> None:
        from vllm.lora.request import LoRARequest

        self.adapters: dict[str, Any] = {}
        for number, (name, rank) in enumerate(RANKS.items()):
            kind = "full" if name in FULL else "router" if name == ROUTER else "attention"
            path = self.folder / f"{self.case.model}-adapters" / name
            with locked(path):
                models.write_adapter(path, self.case.model, seed=100 + number, rank=rank, strength=0.4 / rank**0.5, kind=kind)
            self.adapters[name] = LoRARequest(name, number + 1, str(path))
            self.llm.llm_engine.add_lora(self.adapters[name])

    def ask(self, requests: Sequence[Request]) -> list[Answer]:
        adapters = {name: self.adapters[name] for name in {request.adapter for request in requests} if name}
        return ask(self.llm, requests, adapters, num_tokens=NUM_TOKENS)

    def answer(self, name: str, requests: Sequence[Request]) -> None:
        self.document["answers"][name] = _plain(self.ask(requests))

    def merged(self) -> None:
        self.document["merged"] = {}
        router = [Request(prompt=prompt, adapter=ROUTER) for prompt in PROMPTS]
        if self.case.has_router:
            self.answer(ROUTER, router)
        for name in [*FULL, ROUTER] if self.case.has_router else FULL:
            try:
                self.llm.collective_rpc("merge_into_base", args=(self.adapters[name].lora_int_id,))
                self.document["merged"][name] = _plain(self.ask(ALL_BASE[:4]))
            finally:
                self.llm.collective_rpc("take_out_of_base")

    def inspect(self) -> None:
        """What the workers tell of their slots before and after an adapter left, and whether its slot can be zeroed in use and free."""
        call, last = self.llm.collective_rpc, self.adapters["a2"]
        before = call("tenantry_slots")[0]
        slot = next(entry["index"] for entry in before["slots"] if entry["lora_int_id"] == last.lora_int_id)
        seen: dict[str, Any] = {"before": before, "slot": slot, "unmatched": call("tenantry_unmatched_modules", args=(1,))[0]}
        seen["zeroed_in_use"] = call("tenantry_zero_slot", args=(slot,))[0]
        self.llm.llm_engine.remove_lora(last.lora_int_id)
        seen["after"] = call("tenantry_slots")[0]
        seen["zeroed_free"] = call("tenantry_zero_slot", args=(slot,))[0]
        self.llm.llm_engine.add_lora(last)
        self.document["inspection"] = seen

    def warm_up(self) -> None:
        self.document["warm_up_s"] = self.llm.collective_rpc("tenantry_warm_up")[0]
        self.answer("after warm-up", BATCHES["base beside adapters"])


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time: they share adapters."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _watch_compilations() -> list[str]:
    """Names of kernels as vLLM's monitor reports them from now on."""
    from vllm.utils import jit_monitor

    names: list[str] = []
    report = jit_monitor._handle_jit_event
    jit_monitor._handle_jit_event = lambda **event: (names.append(event["fn_name"]), report(**event))[1]
    return names


def _our_kernels() -> set[str]:
    from triton.runtime import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("lora_kernels")]
    return {name for module in modules for name, value in vars(module).items() if isinstance(value, JITFunction)}


def _plain(answers: list[Answer]) -> list[dict[str, Any]]:
    return [asdict(answer) for answer in answers]


if __name__ == "__main__":
    Program(Path(sys.argv[1]), sys.argv[2], sys.argv[3]).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # vLLM's own end takes seconds
