"""Compiles the dense layers' kernels for an H200 under the default tiles. A program of its own, outside the interpreter.

Prints one JSON object per kernel, rank and number of tokens.
"""

import json
import sys

from lora_kernels.configs import Shape, default_tiles, padded_rank
from lora_kernels.dense_expand.kernel import expand_list_kernel, expand_slots_kernel
from lora_kernels.dense_expand.op import reads_under_way
from lora_kernels.dense_shrink.kernel import shrink_list_kernel, shrink_slots_kernel
from lora_kernels.dense_shrink.op import MOST_JOINED_COLUMNS, WIDE_ROWS
from lora_kernels.dense_shrink.paths import rank_block
from machine_code import machine_code

K, WIDTHS = 5120, (8192, 1024, 1024)
TYPES = dict.fromkeys(("slots_ptr", "order_ptr", "groups_ptr", "starts_ptr", "counts_ptr", "ranks_ptr"), "*i32") | {"partials_ptr": "*fp32"}


def main() -> None:
    for rank in (8, 32, 128, 256):
        for tokens in (32, 4096):
            compile_for(rank, tokens)


def compile_for(rank: int, tokens: int) -> None:
    shape = {"dtype": "bfloat16", "rank": rank, "slices": 3, "adapters": 8, "rows": tokens}
    shrink = default_tiles(Shape(op="dense_shrink", width=K, **shape))
    expand = default_tiles(Shape(op="dense_expand", width=sum(WIDTHS), **shape))
    wide, splits = shrink.rows >= WIDE_ROWS, -(-K // (shrink.block * shrink.steps))
    common = {"R": rank, "R_PAD": padded_rank(rank), "SLICES": 3, "HAS_RANKS": False, "PDL": 2}
    whole = {"BLOCK_R": padded_rank(rank) if wide else rank_block(rank)}
    a = {**common, **whole, "K": K, "BLOCK_K": shrink.block, "STEPS": shrink.steps, "STAGES": shrink.stages, "ROWS": shrink.rows}
    b = {**common, **whole, **dict(zip(("N0", "N1", "N2"), WIDTHS, strict=True)), "BLOCK_N": expand.block, "ROWS": expand.rows}
    b |= {"EVEN_N": False, "ALIGNED_N": True}
    b["UNROLLED"] = reads_under_way(splits, expand.rows * b["BLOCK_R"], expand.num_warps)
    joined = wide and 3 * padded_rank(rank) <= MOST_JOINED_COLUMNS
    report(rank, tokens, shrink_list_kernel, {**a, "GROUPS": 16, "JOINED": joined}, shrink.num_warps)
    runs = {"GROUPS": 16, "PIECES": 1 if wide else 2, "STEPS": expand.steps, "STAGES": expand.stages}
    report(rank, tokens, expand_list_kernel, {**b, **runs}, expand.num_warps)
    if tokens == 32:
        report(rank, tokens, shrink_slots_kernel, {**a, "TOKENS": tokens}, shrink.num_warps)
        report(rank, tokens, expand_slots_kernel, {**b, "TOKENS": tokens}, expand.num_warps)


def report(rank: int, tokens: int, kernel: object, constants: dict[str, object], num_warps: int) -> None:
    sys.stdout.write(json.dumps({"rank": rank, "tokens": tokens, **machine_code(kernel, constants, TYPES, num_warps=num_warps)}) + "\n")


if __name__ == "__main__":
    main()
