"""What one LoRA path of a real vLLM answers for small models of real layer shapes: a program, run once for each path.

`python vllm_answers.py FOLDER MODEL...` under TENANTRY_KERNELS=off or on; writes FOLDER/<off or on>.json. Weights and adapters
are the same for both. With `on` each adapter's own answers are also asked of the base with that adapter merged into it.
"""

import gc
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch
import vllm_models as models
from vllm_compare import Answer, Request, ask

ADAPTERS = {"a0": 32, "a1": 8, "a2": 16}
"""Ranks by name, in slots of rank 32."""
NUM_TOKENS = 12
PROMPTS = tuple(tuple((7 * i + 3 * j * j + 11 * j + 1) % (models.VOCAB - 1) + 1 for j in range(n)) for i, n in enumerate((5, 17, 40, 9)))
LONG = tuple(tuple((7 * j * j + 13 * j + i) % (models.VOCAB - 1) + 1 for j in range(400)) for i in range(4))


def batches() -> dict[str, list[Request]]:
    names = list(ADAPTERS)
    base = [Request(prompt=prompt) for prompt in PROMPTS]
    made = {
        "base beside base": base * 2,
        "base beside adapters": base + [Request(prompt=prompt, adapter=names[i % 3]) for i, prompt in enumerate(PROMPTS)],
        "prefill": [Request(prompt=prompt, adapter=name) for prompt, name in zip(LONG, (None, *names), strict=True)],
        "one": [Request(prompt=PROMPTS[1], adapter="a1")],
    }
    return made | {name: [Request(prompt=prompt, adapter=name) for prompt in PROMPTS] for name in names}


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    path = os.environ["TENANTRY_KERNELS"]
    from lora_kernels.vllm_plugin import register, status

    register()
    document: dict[str, Any] = {"status": asdict(status()), "models": {}}
    models.seed_dummy_weights()
    for name in names:
        started_s = time.monotonic()
        document["models"][name] = answers_of(folder, name, merge=path == "on" and name != "gptoss")
        print(f"{path} {name}: {time.monotonic() - started_s:.1f} s", flush=True)
        (folder / f"{path}.json").write_text(json.dumps(document))


def answers_of(folder: Path, name: str, *, merge: bool) -> dict[str, Any]:
    llm = start(folder, name)
    adapters = mount(llm, folder, name)
    manager = _manager(llm)
    experts = {type(m._moe_kernel.fused_experts).__name__ for m in manager.modules.values() if hasattr(m, "_moe_kernel")}
    wrappers = {type(wrapper).__name__ for wrapper in manager.punica_wrapper_mapping.values()}
    answers = {batch: ask(llm, requests, adapters, num_tokens=NUM_TOKENS) for batch, requests in batches().items()}
    again = ask(llm, batches()["base beside adapters"], adapters, num_tokens=NUM_TOKENS)
    document = {
        "experts": sorted(experts),
        "wrappers": sorted(wrappers),
        "answers": _plain(answers),
        "repeats": again == answers["base beside adapters"],
    }
    if document["wrappers"] == ["GpuLoraWrapper"]:
        document["inspection"] = inspect(llm, adapters)
    if merge:
        merged = {}
        base = [Request(prompt=prompt) for prompt in PROMPTS]
        for adapter, request in adapters.items():
            slot = manager.lora_index_to_id.index(request.lora_int_id)
            add_to_base(manager, slot)
            merged[adapter] = ask(llm, base, {}, num_tokens=NUM_TOKENS)
            restore(manager)
        document["merged"] = _plain(merged)
    llm.llm_engine.engine_core.shutdown()
    del llm, manager
    gc.collect()
    torch.cuda.empty_cache()
    return document


def inspect(llm: Any, adapters: dict[str, Any]) -> dict[str, Any]:
    """What the worker tells of its slots before and after an adapter left, and whether its slot can be zeroed in use and free."""
    last = adapters["a2"]
    before = llm.collective_rpc("tenantry_slots")[0]
    slot = next(entry["index"] for entry in before["slots"] if entry["lora_int_id"] == last.lora_int_id)
    in_use = llm.collective_rpc("tenantry_zero_slot", args=(slot,))[0]
    llm.llm_engine.remove_lora(last.lora_int_id)
    after = llm.collective_rpc("tenantry_slots")[0]
    free = llm.collective_rpc("tenantry_zero_slot", args=(slot,))[0]
    llm.llm_engine.add_lora(last)
    warm_up_s = llm.collective_rpc("tenantry_warm_up")[0]
    return {"before": before, "after": after, "slot": slot, "zeroed_in_use": in_use, "zeroed_free": free, "warm_up_s": warm_up_s}


def start(folder: Path, name: str) -> Any:
    from vllm import LLM

    return LLM(
        model=str(models.write_model(folder / name, name)),
        load_format="dummy",
        skip_tokenizer_init=True,
        seed=0,
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=4096,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        disable_log_stats=True,
        enable_lora=True,
        max_loras=4,
        max_lora_rank=32,
        worker_extension_cls="lora_kernels.vllm_plugin.inspect.WorkerInspection",
        # vLLM's own path would take other weights' layout, and so other roundings, for GPT-OSS; on both paths it is the same here.
        moe_backend="triton_unfused" if name == "gptoss" else "auto",
        compilation_config={"cudagraph_capture_sizes": [1, 8, 16]},
    )


def mount(llm: Any, folder: Path, name: str) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    adapters = {}
    for number, (adapter, rank) in enumerate(ADAPTERS.items()):
        path = folder / f"{name}-{adapter}"
        if not path.exists():
            models.write_adapter(path, name, seed=100 + number, rank=rank, strength=0.4 / rank**0.5)
        adapters[adapter] = LoRARequest(adapter, number + 1, str(path))
        llm.llm_engine.add_lora(adapters[adapter])
    return adapters


_saved: list[tuple[torch.Tensor, torch.Tensor]] = []


@torch.no_grad()
def add_to_base(manager: Any, slot: int) -> None:
    """The slot's B A of every layer into the base's own weights, in place: captured graphs read them there."""
    for module in manager.modules.values():
        if hasattr(module, "w13_lora_a_stacked"):
            weights = module.base_layer.routed_experts
            pairs = [(weights.w13_weight, module.w13_lora_a_stacked, module.w13_lora_b_stacked)]
            pairs.append((weights.w2_weight, module.w2_lora_a_stacked, module.w2_lora_b_stacked))
        elif isinstance(getattr(module, "lora_a_stacked", None), tuple):
            pairs = [(module.base_layer.weight, module.lora_a_stacked, module.lora_b_stacked)]
        else:
            continue
        for weight, a_stacks, b_stacks in pairs:
            delta = torch.cat([b[slot].float() @ a[slot].float() for a, b in zip(a_stacks, b_stacks, strict=True)], dim=-2)
            _saved.append((weight, weight.clone()))
            weight.copy_((weight.float() + delta.view(weight.shape)).to(weight.dtype))


def restore(manager: Any) -> None:
    for weight, before in _saved:
        weight.data.copy_(before)
    _saved.clear()


def _manager(llm: Any) -> Any:
    worker = llm.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner.lora_manager._adapter_manager


def _plain(answers: dict[str, list[Answer]]) -> dict[str, list[dict[str, Any]]]:
    return {batch: [asdict(answer) for answer in rows] for batch, rows in answers.items()}


if __name__ == "__main__":
    main()
