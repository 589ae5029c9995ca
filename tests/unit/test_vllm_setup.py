"""What keeps a real engine from starting is one line that says what to do; what it may be told and may serve is fixed. Without vLLM."""

import dataclasses
import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker import vllm_app, vllm_fit
from services.worker import vllm_setup as setup
from services.worker.vllm_adapters import largest_difference, probe_prompt
from services.worker.vllm_fit import Parallel
from services.worker.vllm_setup import VllmModules, VllmSettings
from shared.contracts.base import BaseDescription, Module
from shared.errors import StartFailed


def settings(**changes: Any) -> VllmSettings:
    return VllmSettings(**{"model": "/no/such", "cluster_secret": b"s", **changes})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_a_folder_with_config_and_weights_is_a_model(model: Path) -> None:
    assert setup.model_folder(settings(model=str(model))) == model


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/nothing", "a/b/c", "nothing"])
def test_a_folder_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(StartFailed, match="there is no model folder"):
        setup.model_folder(settings(model=name))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_config_or_weights_is_named(model: Path, missing: str) -> None:
    (model / missing).unlink()
    with pytest.raises(StartFailed, match="not a model folder"):
        setup.model_folder(settings(model=str(model)))


def test_a_hub_id_that_the_hub_does_not_give_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError("no network")

    hub = SimpleNamespace(snapshot_download=refuse)
    _import(monkeypatch, {"huggingface_hub": hub})
    with pytest.raises(StartFailed, match="the hub did not give org/name"):
        setup.model_folder(settings(model="org/name"))


def test_what_does_not_fit_into_memory_is_said_in_figures() -> None:
    setup.check_memory(settings(kv_cache_gib=1), weights_bytes=setup.GIB, available_bytes=4 * setup.GIB)
    with pytest.raises(StartFailed, match=r"about 5\.0 GiB.*4\.0 are free") as failed:
        setup.check_memory(settings(kv_cache_gib=2), weights_bytes=setup.GIB, available_bytes=4 * setup.GIB)
    assert failed.value.fields == {"asked_bytes": 5 * setup.GIB, "available_bytes": 4 * setup.GIB}


def _import(monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any]) -> None:
    real = importlib.import_module

    def fake(name: str, package: str | None = None) -> Any:
        if name in modules:
            if isinstance(modules[name], Exception):
                raise modules[name]
            return modules[name]
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", fake)


def _status(*, active: bool, right: bool) -> Any:
    return SimpleNamespace(status=lambda: SimpleNamespace(active=active, lora_is_right=right, reason="TENANTRY_KERNELS=off"))


@pytest.mark.parametrize(
    ("modules", "line"),
    [
        ({"vllm": ImportError("No module named 'vllm'")}, "make venv"),
        ({"vllm": SimpleNamespace(__version__="0.9.1")}, "vLLM 0.9.1 is installed; 0.26 to 0.33"),
        ({"vllm": SimpleNamespace(__version__="0.34.0")}, "vLLM 0.34.0 is installed"),
        ({"vllm": SimpleNamespace(__version__="dev")}, "vLLM dev is installed"),
        (
            {"vllm": SimpleNamespace(__version__="0.32.0+cpu"), "lora_kernels.vllm_plugin": ImportError("no")},
            "lora-kernels is not installed",
        ),
        (
            {
                "vllm": SimpleNamespace(__version__="0.32.0+cpu"),
                "lora_kernels.vllm_plugin": _status(active=False, right=False),
                "vllm.plugins": SimpleNamespace(load_general_plugins=lambda: None),
                "vllm.platforms": SimpleNamespace(current_platform=SimpleNamespace(device_type="cpu")),
            },
            "mixes adapters up, and ours is not active: TENANTRY_KERNELS=off",
        ),
    ],
)
def test_a_vllm_that_must_not_serve_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any], line: str) -> None:
    _import(monkeypatch, modules)
    with pytest.raises(StartFailed, match=line):
        setup.import_vllm()


@dataclasses.dataclass
class Arguments:
    model: str = ""
    dtype: str = ""
    seed: int = 0
    enable_lora: bool = False
    max_loras: int = 0
    max_cpu_loras: int = 0
    max_lora_rank: int = 0
    lora_target_modules: list[str] = dataclasses.field(default_factory=list)
    max_num_seqs: int = 0
    enable_prefix_caching: bool = False
    disable_log_stats: bool = False
    use_tqdm_on_load: bool = True
    worker_extension_cls: str = ""
    scheduler_cls: str = ""
    long_prefill_token_threshold: int = 0
    max_model_len: int = 0
    block_size: int = 0
    enforce_eager: bool = False
    quantization: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    gpu_memory_utilization: float = 0.0


def modules(start: Any = None, *, is_cpu: bool = True) -> VllmModules:
    parser = SimpleNamespace(parse_args=lambda _: SimpleNamespace(tool_call_parser=None, model=""))
    return VllmModules(
        version="0.32.0",
        is_cpu=is_cpu,
        engine_args=Arguments,
        async_llm=SimpleNamespace(from_engine_args=start),
        lora_request=None,
        sampling_params=None,
        build_app=None,
        init_app_state=None,
        make_arg_parser=lambda _: parser,
        argument_parser=lambda: None,
    )


DESCRIPTION = BaseDescription(
    identity="b@1",
    label="b",
    architecture="A",
    model_type="a",
    dtype="float32",
    modules=(
        Module(path="model.layers.0.self_attn.q_proj", in_features=8, out_features=4),
        Module(path="model.layers.1.self_attn.q_proj", in_features=8, out_features=4),
        Module(path="model.layers.0.mlp.experts.up_proj", in_features=8, out_features=2, experts=3),
    ),
)


def test_slots_are_for_the_layers_that_validation_knows_and_cost_what_it_says() -> None:
    assert setup.target_modules(DESCRIPTION) == ["experts", "q_proj"]
    assert setup.slot_bytes_per_rank(DESCRIPTION, 2) == 2 * (12 + 12 + 3 * 10)


def test_engine_arguments_of_the_operator_come_over_ours() -> None:
    asked = settings(max_loras=3, max_model_len=64, engine_args={"quantization": "fp8", "block_size": 64, "tool_call_parser": "hermes"})
    arguments = setup.start_engine(modules(lambda given: given), asked, Path("/m"), DESCRIPTION)
    assert (arguments.quantization, arguments.block_size, arguments.max_model_len) == ("fp8", 64, 64)
    assert arguments.max_loras == arguments.max_cpu_loras == 3  # so that no adapter is ever evicted
    assert arguments.enable_prefix_caching and arguments.enforce_eager
    assert vllm_app.application_arguments(modules(), asked, Path("/m"), "b").tool_call_parser == "hermes"


def test_on_a_gpu_the_engine_gets_its_share_of_the_cards_and_captures_graphs() -> None:
    asked = settings(parallel=Parallel(tensor=2, pipeline=3, experts=True), gpu_memory_fraction=0.7, quantization="mxfp4")
    arguments = setup.start_engine(modules(lambda given: given, is_cpu=False), asked, Path("/m"), DESCRIPTION)
    assert (arguments.tensor_parallel_size, arguments.pipeline_parallel_size, arguments.enable_expert_parallel) == (2, 3, True)
    assert (arguments.gpu_memory_utilization, arguments.quantization, arguments.enforce_eager) == (0.7, "mxfp4", False)


def test_parallel_sizes_in_the_operators_arguments_are_judged_like_the_settings() -> None:
    assert setup.asked_parallel(settings(parallel=Parallel(tensor=2))) == Parallel(tensor=2)
    given = {"tensor_parallel_size": 4, "enable_expert_parallel": True}
    assert setup.asked_parallel(settings(engine_args=given)) == Parallel(tensor=4, experts=True)


def test_what_does_not_fit_the_card_is_refused_before_vllm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = vllm_fit.Installed(vllm="0.26.0", torch="2.11.0+cu130", torch_cuda="13.0")
    monkeypatch.setattr(vllm_fit, "read_installed", lambda: installed)
    with pytest.raises(StartFailed, match="no NVIDIA driver answers"):
        setup.check_fit(settings(dtype="bfloat16"))


def test_rank_classes_are_vllms_ranks_up_to_the_largest_unless_some_are_chosen() -> None:
    assert setup.rank_classes(settings(), 32) == (1, 8, 16, 32)
    assert setup.rank_classes(settings(rank_classes=(32, 16)), 32) == (16, 32)


@pytest.mark.parametrize("classes", [(8, 16), (12, 32), (32, 64)])
def test_rank_classes_that_vllm_cannot_serve_are_refused(classes: tuple[int, ...]) -> None:
    with pytest.raises(StartFailed, match="the largest being max_lora_rank"):
        setup.rank_classes(settings(rank_classes=classes), 32)


def test_an_argument_that_vllm_does_not_know_is_named_before_anything_starts() -> None:
    with pytest.raises(StartFailed, match="`max_lora`"):
        vllm_app.application_arguments(modules(), settings(engine_args={"max_lora": 3}), Path("/m"), "b")


def test_a_rank_that_vllm_has_no_kernels_for_is_refused() -> None:
    with pytest.raises(StartFailed, match="max_lora_rank is 12; vLLM allows 1, 8, 16"):
        setup.start_engine(modules(), settings(max_lora_rank=12), Path("/m"), DESCRIPTION)


def test_vllms_last_words_are_the_reason_of_a_failed_start() -> None:
    def start(_: object) -> None:
        raise RuntimeError("first line\nnot enough memory for the cache\n")

    with pytest.raises(StartFailed, match="vLLM did not start: not enough memory for the cache; its own lines"):
        setup.start_engine(modules(start), settings(), Path("/m"), DESCRIPTION)


def test_the_environment_is_quiet_offline_and_closed(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(os, "environ", {"VLLM_API_KEY": "k", "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"})
    setup.prepare_environment(settings(model=str(model), kv_cache_gib=3, cpu_threads=4))
    assert not os.environ.keys() & {"VLLM_API_KEY", "VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"}
    for name, value in {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_PLUGINS": "tenantry_lora_kernels",
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "OMP_NUM_THREADS": "4",
    }.items():
        assert os.environ[name] == value


@pytest.mark.parametrize(
    ("tasks", "served"),
    [
        (("generate",), ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/tokenize")),
        (("embed", "token_embed"), ("/v1/embeddings",)),
        (("transcription",), ()),
    ],
)
def test_the_endpoints_follow_from_what_the_engine_can_do(tasks: tuple[str, ...], served: tuple[str, ...]) -> None:
    assert vllm_app.endpoints(tasks) == served


def test_a_probe_is_the_same_tokens_every_time_within_the_vocabulary() -> None:
    assert probe_prompt(768, 48) == probe_prompt(768, 48)
    assert len(set(probe_prompt(768, 48))) == 48
    assert max(probe_prompt(50, 48)) < 50


def test_where_two_answers_part_the_comparison_ends() -> None:
    ours = [{1: -0.5, 2: -1.0}, {3: -0.1, 4: -3.0}, {5: -1.0}]
    parted = [{1: -0.5, 2: -1.0}, {4: -0.2, 3: -0.3}, {5: -9.0}]
    assert largest_difference(ours, parted) == 2.8


def test_probes_differ_by_the_largest_of_what_both_have() -> None:
    base = [{1: -0.5, 2: -1.0}, {3: -2.0}]
    assert largest_difference(base, base) == 0.0
    assert largest_difference(base, [{1: -0.75, 2: -1.25}, {3: -2.5}]) == 0.5
    assert largest_difference(base, [{7: -0.25, 8: -1.5}, {3: -2.0}]) == 1.0  # 1 is at most as likely there as 8
    assert largest_difference(base, [{1: float("nan")}, {3: -2.0}]) == float("inf")
