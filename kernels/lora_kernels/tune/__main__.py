"""`python -m lora_kernels.tune --model gptoss-20b|qwen3-30b-a3b|... [--ops moe,dense,prefill] [--tokens 1,8,32] [--ranks 32]`."""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from lora_kernels.bench.models import DENSE, MOE
from lora_kernels.bench.rows import Key
from lora_kernels.bench.selection import Wanted, select
from lora_kernels.configs import FOLDER_VARIABLE
from lora_kernels.moe_prefill.plan import PrefillPlan
from lora_kernels.tune.candidates import entries_of, paths_of
from lora_kernels.tune.files import write, write_plans
from lora_kernels.tune.prefill import layer_shape
from lora_kernels.tune.search import compile_plans, find, measure, plans_to_compile

BAR = 24


class Progress:
    """A bar on a terminal, a line for each finished row elsewhere."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._began = total, 0, time.monotonic()
        self._live = sys.stderr.isatty()

    def says(self, text: str) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K" + self._line(text))

    def ends(self, text: str) -> None:
        self._done += 1
        sys.stderr.write(("\r\x1b[K" if self._live else "") + self._line(text) + "\n")

    def _line(self, text: str) -> str:
        filled = BAR * self._done // max(self._total, 1)
        took = time.monotonic() - self._began
        return f"[{'#' * filled}{'.' * (BAR - filled)}] {self._done}/{self._total} {took:>4.0f} s  {text}"[:140]


def compile_all(keys: list[Key], processes: int, said: Callable[[str], None]) -> None:
    """Kernels do not depend on the number of tokens but where another path begins: each plan is compiled once a model and rank."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        seen, waiting = set(), []
        for key in reversed(keys):  # the longest batches know most paths
            for path in paths_of(key):
                name = (key.op, key.model, key.layer, key.rank, key.adapters, str(path))
                if name not in seen:
                    seen.add(name)
                    waiting += [pool.submit(compile_plans, key, [plan]) for plan in plans_to_compile(path)]
        for number, one in enumerate(waiting, 1):
            failed = one.exception()
            said(f"compiled {number} of {len(waiting)}" + (f", one failed: {failed}" if failed else ""))


def main() -> int:
    models = sorted({*MOE, *(layer.model for layer in DENSE)})
    parser = argparse.ArgumentParser(prog="lora_kernels.tune", description="Search tiles for a model on this GPU.")
    parser.add_argument("--model", required=True, choices=models)
    parser.add_argument("--ops", default="moe,dense,prefill", help="some of moe,dense,prefill")
    parser.add_argument("--tokens", default="1,8,16,32,64,128,256,1600,6400,12800", help="by commas; from 1,024 prefill")
    parser.add_argument("--ranks", default="32", help="by commas")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compile")
    parser.add_argument("--to", type=Path, default=os.environ.get(FOLDER_VARIABLE) or Path(__file__).parents[1] / "configs")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here: tiles are found by timing")
    tokens, ranks = ([int(part) for part in text.split(",")] for text in (chosen.tokens, chosen.ranks))
    wanted = Wanted(ops=chosen.ops.split(","), models=[chosen.model], tokens=tokens, ranks=ranks, adapters=[chosen.slots])
    keys = select(wanted)
    if not keys:
        parser.error(f"{chosen.model} has nothing to tune under these options")
    progress, gpu = Progress(len(keys)), torch.cuda.get_device_name()
    compile_all(keys, chosen.processes, progress.says)
    for key in keys:
        title = f"{key.layer or 'experts'}, {key.tokens} tokens, rank {key.rank}"
        plan, best = find(paths_of(key), measure(key), lambda text, title=title: progress.says(f"{title}: {text}"))
        if key.op == "moe_lora_prefill":
            file = write_plans(Path(chosen.to), gpu, [(layer_shape(key), PrefillPlan(**plan))])
        else:
            file = write(Path(chosen.to), gpu, entries_of(key, plan))
        progress.ends(f"{title}: {best:.1f} us")
        torch.cuda.empty_cache()
    sys.stdout.write(f"written: {file}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
