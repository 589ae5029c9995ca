"""What does not fit together is refused in one line that names both sides; sizes that were never run are refused unless asked for."""

from typing import Any

import msgspec
import pytest

from services.worker import vllm_fit
from services.worker.vllm_fit import Gpu, Installed, Parallel, doubts, refusal

H200 = Gpu(name="NVIDIA H200", capability=(9, 0))
FITS = Installed(
    vllm="0.26.0",
    torch="2.11.0+cu130",
    vllm_wants_torch="2.11.0",
    torch_cuda="13.0",
    driver="580.95.05",
    driver_cuda="13.0",
    gpus=(H200,),
)


def test_what_was_run_on_the_card_may_start() -> None:
    assert refusal(FITS, Parallel(), "bfloat16", is_unproven_wanted=False) == ""
    assert doubts(FITS, Parallel()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": "2.13.0+cpu", "torch_cuda": ""}, "built without CUDA"),
        ({"torch": "2.10.1"}, "built for torch 2.11.0, torch 2.10.1 is installed"),
        ({"driver": "", "driver_cuda": "", "gpus": ()}, "no NVIDIA driver"),
        ({"driver": "550.54", "driver_cuda": "12.4"}, "driver 550.54 serves CUDA up to 12.4, torch 2.11.0.cu130 needs 13.0"),
        ({"gpus": ()}, "needs 1 GPUs, 0 are visible"),
        ({"gpus": (Gpu(name="Tesla T4", capability=(7, 5)),)}, "Tesla T4 has compute capability 7.5, at least 8.0"),
    ],
)
@pytest.mark.parametrize("unproven", [False, True])
def test_what_does_not_fit_is_refused_whatever_is_asked_for(changes: dict[str, Any], words: str, unproven: bool) -> None:
    said = refusal(msgspec.structs.replace(FITS, **changes), Parallel(), "bfloat16", is_unproven_wanted=unproven)
    assert words.replace(".cu130", "+cu130") in said


@pytest.mark.parametrize("driver_cuda", ["13.0", "13.2", "14.0"])
def test_a_driver_of_the_same_cuda_generation_or_a_newer_one_fits(driver_cuda: str) -> None:
    assert refusal(msgspec.structs.replace(FITS, driver_cuda=driver_cuda), Parallel(), "bfloat16", is_unproven_wanted=False) == ""


@pytest.mark.parametrize("parallel", [Parallel(tensor=2), Parallel(pipeline=2), Parallel(tensor=2, experts=True)])
def test_a_parallel_size_that_was_never_run_starts_only_when_asked_for(parallel: Parallel) -> None:
    two = msgspec.structs.replace(FITS, gpus=(H200, H200))
    assert "never run on a card" in refusal(two, parallel, "bfloat16", is_unproven_wanted=False)
    assert refusal(two, parallel, "bfloat16", is_unproven_wanted=True) == ""


def test_float32_on_a_card_starts_only_when_asked_for() -> None:
    assert "bfloat16" in refusal(FITS, Parallel(), "float32", is_unproven_wanted=False)
    assert refusal(FITS, Parallel(), "float32", is_unproven_wanted=True) == ""


def test_another_card_or_vllm_is_a_doubt_and_no_refusal() -> None:
    other = msgspec.structs.replace(FITS, vllm="0.33.0", gpus=(Gpu(name="NVIDIA H100", capability=(9, 0)),))
    assert refusal(other, Parallel(), "bfloat16", is_unproven_wanted=False) == ""
    assert doubts(other, Parallel()) == ["not run on NVIDIA H100 before", "vLLM 0.33.0 was not run on a GPU before; 0.26 was"]


def test_the_torch_that_vllm_pins_is_read_from_its_package() -> None:
    assert vllm_fit._wanted_torch(["torchaudio==2.11.0", 'torch == 2.11.0 ; platform_machine == "x86_64"', "numpy"]) == "2.11.0"
    assert vllm_fit._wanted_torch(["torch>=2.9"]) == ""
