"""Our LoRA path in a real vLLM 0.26 against vLLM's own and against merged weights, on GPUs: eager, and compiled with CUDA graphs.

bfloat16 roundings differ between kernels, and now and then a router's near tie flips an expert; so equal means: log-probabilities of
the same tokens close on the average, few far apart, and the same greedy tokens up to a first position at which the two were likely
alike. Another adapter's answer, or the base's, differs by more than a nat on the average. Bits are compared where kernels are the same:
the base's answers, and a batch asked again.

Engines run side by side, a process each, those of the tests chosen:
`KERNELS_PYTHON=python3 make test-kernels KERNEL_FILES=tests/kernels_gpu/test_vllm_equivalence.py ARGS="-n0 -k eager"`, on two GPUs
`-k tp2`.
"""

import concurrent.futures
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_models
from vllm_compare import Answer, compare, from_json

HERE = Path(__file__).parent
RUNS = [(case, mode) for mode in ("eager", "compiled") for case in vllm_models.CASES]
RUNS += [(case, "tp2") for case in ("qwen3-moe", "gptoss", "qwen3")]
MEAN, FAR, SHARE_FAR, NEAR_TIE = 0.04, 0.3, 0.02, 0.6
"""In nats: the most that log-probabilities may differ on the average; what counts as far, for how large a share; and the most by which a
token may have been preferred to the one that the other path took."""

if not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None:
    pytest.skip("needs a GPU, with vLLM 0.26", allow_module_level=True)
if "PYTEST_XDIST_WORKER" in os.environ:
    pytest.skip("starts processes of its own: run it with -n0", allow_module_level=True)

pytestmark = pytest.mark.timeout(900)


class Engines:
    """The documents of all engines that the chosen tests need, started when the first is asked for."""

    def __init__(self, folder: Path, runs: list[tuple[str, str]]) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        keys = [(case, mode, path) for case, mode in runs for path in ("off", "on")]
        self._found = {key: self._pool.submit(self._run, folder, *key) for key in keys}

    def document(self, case: str, mode: str, path: str) -> dict[str, Any]:
        return self._found[case, mode, path].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    @staticmethod
    def _run(folder: Path, case: str, mode: str, path: str) -> dict[str, Any]:
        name = f"{case}-{mode}-{path}"
        search = [str(HERE.parents[1] / "kernels"), str(HERE), *sys.path]
        environment = os.environ | {
            "TENANTRY_KERNELS": path,
            "PYTHONPATH": os.pathsep.join(search),
            "VLLM_CACHE_ROOT": str(folder / f"{name}-cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": "2",
        }
        command = ["nice", "-n", "0" if mode == "eager" else "5", sys.executable, str(HERE / "vllm_answers.py"), str(folder), case, mode]
        with (folder / f"{name}.log").open("w") as log:
            code = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=420, check=False).returncode
        made = folder / f"{name}.json"
        document = json.loads(made.read_text()) if made.exists() else {"answers": {}, "errors": {}}
        if code:
            document["errors"]["process"] = f"exit {code}: {(folder / f'{name}.log').read_text()[-3000:]}"
        return document


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    parameters = [getattr(getattr(item, "callspec", None), "params", {}) for item in request.session.items]
    chosen = {given["run"] for given in parameters if "run" in given}
    kept = os.environ.get("EQUIVALENCE_FOLDER")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("vllm")
    running = Engines(folder, [run for run in RUNS if run in chosen and _can_run(run)])
    yield running
    running.close()


def _can_run(run: tuple[str, str]) -> bool:
    return run[1] != "tp2" or torch.cuda.device_count() > 1


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def run(request: pytest.FixtureRequest) -> tuple[str, str]:
    if not _can_run(request.param):
        pytest.skip("needs two GPUs")
    return request.param


@pytest.fixture
def ours(engines: Engines, run: tuple[str, str]) -> dict[str, Any]:
    return engines.document(*run, "on")


@pytest.fixture
def stock(engines: Engines, run: tuple[str, str]) -> dict[str, Any]:
    return engines.document(*run, "off")


def part(document: dict[str, Any], name: str) -> Any:
    assert name in document, document["errors"]
    return document[name]


def answers(document: dict[str, Any], batch: str, *, of: str = "answers") -> list[Answer]:
    assert batch in part(document, of), document["errors"]
    return [from_json(answer) for answer in document[of][batch]]


def assert_equal(one: list[Answer], other: list[Answer], what: str) -> None:
    differences = [compare(a, b) for a, b in zip(one, other, strict=True)]
    apart = [value for difference in differences for value in difference.logprobs]
    assert sum(apart) / len(apart) <= MEAN, f"{what}: mean {sum(apart) / len(apart)}"
    assert sum(value > FAR for value in apart) / len(apart) <= SHARE_FAR, f"{what}: {sorted(apart)[-20:]}"
    assert max(difference.margin for difference in differences) <= NEAR_TIE, f"{what}: {[d.margin for d in differences]}"


def test_each_path_is_the_one_that_was_asked_for(stock: dict[str, Any], ours: dict[str, Any], run: tuple[str, str]) -> None:
    experts = vllm_models.CASES[run[0]].experts
    for worker in part(stock, "workers"):
        assert (worker["code"], worker["wrappers"]) == ("off", ["PunicaWrapperGPU"])
    for worker in part(ours, "workers"):
        assert (worker["code"], worker["wrappers"]) == ("active", ["GpuLoraWrapper"])
        assert worker["experts"] == ([experts] if experts else [])


@pytest.mark.parametrize(
    "batch", ["base beside base", "base beside adapters", "every slot", "one", "a0", "a1", "a2", "long base", "prefill"]
)
def test_a_batch_is_answered_as_vllms_own_path_answers_it(stock: dict[str, Any], ours: dict[str, Any], batch: str) -> None:
    assert_equal(answers(stock, batch), answers(ours, batch), batch)


@pytest.mark.parametrize("adapter", ["a0", "a1", "a2", "r7"])
def test_an_adapter_answers_as_the_base_with_its_weights_merged(ours: dict[str, Any], run: tuple[str, str], adapter: str) -> None:
    case = vllm_models.CASES[run[0]]
    if not case.can_merge or (adapter == "r7" and not case.has_router):
        pytest.skip("MXFP4 weights take no merge" if not case.can_merge else "a model without a router")
    assert_equal(answers(ours, adapter, of="merged"), answers(ours, adapter), adapter)


@pytest.mark.parametrize("batch", ["base beside base", "long base"])
def test_base_answers_have_the_same_bits_with_none_and_with_eight_adapters_mounted(
    ours: dict[str, Any], run: tuple[str, str], batch: str
) -> None:
    skip_unrepeatable(run)
    assert answers(ours, batch, of="unmounted") == answers(ours, batch)


@pytest.mark.parametrize(
    ("alone", "mixed", "rows"),
    [("base beside base", "base beside adapters", 4), ("short base", "short beside adapters", 4), ("long base", "prefill", 1)],
)
def test_base_answers_have_the_same_bits_beside_adapters(
    ours: dict[str, Any], run: tuple[str, str], alone: str, mixed: str, rows: int
) -> None:
    skip_unrepeatable(run)
    assert answers(ours, alone)[:rows] == answers(ours, mixed)[:rows]


def skip_unrepeatable(run: tuple[str, str]) -> None:
    if not vllm_models.CASES[run[0]].repeatable:
        pytest.skip("the base's own products do not give the same bits twice")


def test_the_adapters_change_the_answers_and_each_in_its_own_way(ours: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="mean"):
        assert_equal(answers(ours, "a0"), answers(ours, "a1"), "two adapters")
    of_last_prompt = [answers(ours, batch)[3].tokens for batch in ("base beside base", "a0", "a1", "a2")]
    assert len(set(of_last_prompt)) == 4


def test_a_batch_asked_again_gets_the_same_bits(ours: dict[str, Any], run: tuple[str, str]) -> None:
    skip_unrepeatable(run)
    assert answers(ours, "again") == answers(ours, "base beside adapters")


def test_slots_can_be_seen_and_a_released_one_is_zero(ours: dict[str, Any]) -> None:
    seen = part(ours, "inspection")
    before, after = seen["before"]["slots"][seen["slot"]], seen["after"]["slots"][seen["slot"]]

    assert before["lora_int_id"] == 3 and not before["all_zero"]
    assert after["lora_int_id"] is None and after["all_zero"]
    assert not seen["zeroed_in_use"] and seen["zeroed_free"]
    assert seen["unmatched"] == []
    assert seen["before"]["slot_bytes"] * 8 == seen["before"]["total_bytes"]


def test_warming_up_changes_no_answer(ours: dict[str, Any], run: tuple[str, str]) -> None:
    assert part(ours, "warm_up_s") > 0
    skip_unrepeatable(run)
    assert answers(ours, "after warm-up") == answers(ours, "base beside adapters")


def test_after_a_warm_up_no_request_compiles_a_kernel_of_ours(ours: dict[str, Any], run: tuple[str, str]) -> None:
    if run[1] != "compiled":
        pytest.skip("eager: the warm-up comes last there; two GPUs: kernels are compiled in other processes")
    assert part(ours, "compiled_in_requests") == []
