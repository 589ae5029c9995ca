"""Compiles the list and prefill kernels for compute capability 9.0, with or without a GPU, and reads the machine code.

Run as a program of its own, outside the interpreter: prints one JSON object per kernel and shape.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton.backends.nvidia
from lora_kernels.moe_prefill.combine import add_down_kernel, sum_choices_kernel
from lora_kernels.moe_prefill.expand_activate import expand_activate_kernel
from lora_kernels.moe_prefill.expand_sum import expand_sum_kernel, schedule_kernel
from lora_kernels.moe_prefill.plan import TOKEN_BLOCK, PrefillPlan, SumTiles, plan_prefill
from lora_kernels.moe_prefill.shrink import shrink_kernel
from lora_kernels.moe_prefill.sum_experts import sum_experts_kernel
from lora_kernels.work_list.kernel import (
    CELLS_PER_PROGRAM,
    CHUNK,
    CHUNKS_PER_STEP,
    scan_kernel,
    scatter_kernel,
    sort_chunks_kernel,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

BINARIES = Path(triton.backends.nvidia.__file__).parent / "bin"
ADAPTERS, RANK = 8, 32
INT_POINTERS = {
    "order",
    "tiles",
    "num_tiles",
    "topk_ids",
    "token_order",
    "token_tiles",
    "num_token_tiles",
    "token_adapters",
    "adapter_enabled",
}
INT_POINTERS |= {"entries", "ranks", "counts", "finished", "totals", "places", "token_places", "schedule", "num_items"}
FLOAT_POINTERS = {"topk_weights"}
SCALARS = {"num_pairs", "max_tiles", "max_token_tiles", "num_tokens", "num_chunks", "lead", "ring_chunks"}


def main() -> None:
    for model, hidden, size, gpt_oss, experts, top_k in (
        ("gptoss-20b", 2880, 2880, True, 32, 4),
        ("qwen3-30b-a3b", 2048, 768, False, 128, 8),
    ):
        plan = plan_prefill(
            num_tokens=12800,
            top_k=top_k,
            num_adapters=ADAPTERS,
            num_experts=experts,
            hidden_size=hidden,
            intermediate_size=size,
            rank=RANK,
        )
        compile_list(model, experts, top_k)
        compile_layer(model, plan, hidden, size, gpt_oss, experts, top_k)


def compile_list(model: str, experts: int, top_k: int) -> None:
    bins = triton.next_power_of_2(ADAPTERS * experts + 2)
    cells = {"NUM_CELLS": ADAPTERS * experts + 1, "BINS": bins, "BLOCK_M": 128}
    count = {"TOP_K": top_k, "NUM_EXPERTS": experts, "NUM_ADAPTERS": ADAPTERS, "HAS_ENABLED": True, "BINS": bins, "CHUNK": CHUNK}
    report(model, sort_chunks_kernel, count)
    report(model, scan_kernel, {**cells, "CHUNKS_PER_STEP": CHUNKS_PER_STEP, "CELLS_PER_PROGRAM": CELLS_PER_PROGRAM})
    report(model, scatter_kernel, {**cells, "CHUNK": CHUNK})


def compile_layer(model: str, plan: PrefillPlan, hidden: int, size: int, gpt_oss: bool, experts: int, top_k: int) -> None:
    rank = {"R": RANK, "BLOCK_R": RANK, "HAS_RANKS": True}
    rank |= {"NUM_EXPERTS": experts, "NO_ADAPTER": ADAPTERS * experts, "LIST_BLOCK": plan.block_m}
    tiles = plan.shrink
    shape = {"TOP_K": top_k, "K": hidden, "SLICES": 1 if gpt_oss else 2, "SPLITS": tiles.parts}
    blocks = {"BLOCK_M": tiles.block_m, "BLOCK_K": tiles.block_n, "STAGES": tiles.num_stages}
    report(model, shrink_kernel, {**rank, **shape, **blocks}, num_warps=tiles.num_warps)

    tiles = plan.activate
    blocks = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "STAGES": tiles.num_stages, "PARTS": tiles.parts}
    shape = {"N": size, "SPLITS": plan.shrink.parts, "GPT_OSS": gpt_oss, "FAST": True}
    report(model, expand_activate_kernel, {**rank, **shape, **blocks}, num_warps=tiles.num_warps)

    tiles = plan.add_down
    blocks = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "STAGES": tiles.num_stages, "PARTS": tiles.parts}
    report(model, add_down_kernel, {**rank, "N": hidden, "SPLITS": plan.activate.parts, **blocks}, num_warps=tiles.num_warps)

    summed = {"NUM_EXPERTS": experts, "ALL_LOCAL": True, "TOP_K": top_k, "N": hidden, "BLOCK_T": 4, "BLOCK_N": 512}
    report(model, sum_choices_kernel, summed, num_warps=4)
    ring = plan.expand_sum or SumTiles(block_m=min(plan.block_m, 64), lead=2, ring=4)
    parts = {"TILE_PARTS": plan.block_m // ring.block_m, "TOKEN_PARTS": TOKEN_BLOCK // ring.block_t}
    common = {"NUM_ADAPTERS": ADAPTERS, "NUM_EXPERTS": experts, "BLOCK_M": ring.block_m, "BLOCK_T": ring.block_t}
    report(model, schedule_kernel, {**common, **parts, "CHUNKS": -(-hidden // ring.chunk_n), "PHASES": 128, "BLOCK": 128})
    shape = {
        "TOP_K": top_k,
        "N": hidden,
        "ALL_LOCAL": True,
        "SPLITS": plan.activate.parts,
        "CHUNK_N": ring.chunk_n,
        "BLOCK_N": ring.block_n,
    }
    report(model, expand_sum_kernel, {**rank, **common, **shape}, num_warps=ring.num_warps)

    if gpt_oss:
        shape = {"TOP_K": top_k, "N": hidden, "ALL_LOCAL": True, "NUM_ADAPTERS": ADAPTERS, "STAGES": 4}
        report(model, sum_experts_kernel, {**rank, **shape, "BLOCK_T": 64, "BLOCK_N": 128}, num_warps=4)


def report(model: str, kernel: JITFunction, constants: dict[str, object], *, num_warps: int = 4) -> None:
    """Pointers of bf16, float32 or int32, aligned to 16 bytes, as torch allocates them; lengths unspecialised."""
    constants = {**constants, "OVERLAP": 1}
    signature: dict[str, str] = {}
    values, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[(index,)] = constants[name]
        elif name in SCALARS:
            signature[name] = "i32"
        else:
            partial = name == "hidden" and kernel in (shrink_kernel, expand_activate_kernel)
            floats = "*fp32" if name in FLOAT_POINTERS or partial else "*bf16"
            floats = "*i64" if name.endswith("starts") else floats
            signature[name] = "i32" if name.endswith("stride") else "*i32" if name in INT_POINTERS else floats
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "launch_pdl": True})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        code, usage = (
            subprocess.run([str(BINARIES / "cuobjdump"), flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found
    line = {
        "kernel": kernel.__name__,
        "model": model,
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "shared_bytes": binary.metadata.shared,
        "two_byte_loads": len(re.findall(r"LDG\.E\.U16", code)),
        "async_copies": len(re.findall(r"LDGSTS", code)),
        "warpgroup_products": len(re.findall(r"HGMMA", code)),
    }
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
