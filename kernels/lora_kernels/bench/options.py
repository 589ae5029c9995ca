"""The command-line options that choose rows, for the benchmark and the profile."""

import argparse
from collections.abc import Callable, Sequence

from lora_kernels.bench.models import DENSE, MOE
from lora_kernels.bench.rows import ROUTINGS
from lora_kernels.bench.selection import MODELS, OPS, Wanted


def add_options(parser: argparse.ArgumentParser) -> None:
    models = sorted({*MOE, *(layer.model for layer in DENSE)})
    parser.add_argument("--ops", type=_names(OPS), default=list(OPS), help=f"some of {','.join(OPS)} (all)")
    parser.add_argument("--models", type=_names(models), default=list(MODELS), help=f"some of {','.join(models)}")
    parser.add_argument("--layers", type=lambda text: text.split(","), help="of dense models (all)")
    parser.add_argument("--tokens", type=_numbers, help="by commas; below 1,024 decode, from there prefill")
    parser.add_argument("--ranks", type=_numbers, help="with any of these three, only what they name is measured (32)")
    parser.add_argument("--adapters", type=_numbers, help="(8)")
    parser.add_argument("--routing", type=_names(ROUTINGS), help=f"some of {','.join(ROUTINGS)} (uniform)")
    parser.add_argument("--part", choices=("all", "usual", "others"), default="all", help="usual: rank 32, 8 adapters, uniform routing")


def wanted_of(chosen: argparse.Namespace) -> Wanted:
    names = ("ops", "models", "layers", "tokens", "ranks", "adapters", "part")
    return Wanted(**{name: getattr(chosen, name) for name in names}, routings=chosen.routing)


def _names(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def split(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in allowed]:
            raise argparse.ArgumentTypeError(f"expected some of {','.join(allowed)}, given {','.join(unknown)}")
        return given

    return split


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if any(number < 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"expected whole numbers above 0, given {text}")
    return numbers
