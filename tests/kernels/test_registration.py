"""What the plugin decides per platform, version and setting, and that vLLM is left alone when it decides against."""

import os
import subprocess
import sys

import pytest
from lora_kernels.vllm_plugin import registration
from lora_kernels.vllm_plugin.registration import LoraPath, decide

CPU = LoraPath(vllm_releases=("0.32",), stock_is_right=False, proven=True, install=lambda: None)
GPU = LoraPath(vllm_releases=("0.26",), stock_is_right=True, proven=False, install=lambda: None)


@pytest.mark.parametrize(
    ("setting", "platform", "vllm_version", "path", "code", "lora_is_right"),
    [
        ("on", "cpu", "0.32.0", CPU, "active", True),
        ("on", "cpu", "0.32.1+cpu", CPU, "active", True),
        ("off", "cpu", "0.32.0", CPU, "off", False),
        ("on", "cpu", "0.31.0", CPU, "vllm_version", False),
        ("on", "cpu", "0.320.0", CPU, "vllm_version", False),
        ("on", "cuda", "0.26.0", GPU, "active", True),
        ("on", "cuda", "0.26.2+cu130", GPU, "active", True),
        ("on", "cuda", "0.32.0", GPU, "vllm_version", True),
        ("off", "cuda", "0.26.0", GPU, "off", True),
        ("on", "rocm", "0.26.0", None, "platform", True),
        ("", "cpu", "0.32.0", CPU, "active", True),
        ("", "cuda", "0.26.0", GPU, "not_proven", True),
    ],
)
def test_the_path_is_active_only_where_it_was_tested(
    setting: str, platform: str, vllm_version: str, path: LoraPath | None, code: str, lora_is_right: bool
) -> None:
    status = decide(setting=setting, platform=platform, vllm_version=vllm_version, path=path)

    assert (status.code, status.active, status.lora_is_right) == (code, code == "active", lora_is_right)


def test_the_paths_are_those_that_the_readme_names() -> None:
    releases = {platform: (path.vllm_releases, path.stock_is_right, path.proven) for platform, path in registration._PATHS.items()}
    assert releases == {"cpu": (("0.32",), False, True), "cuda": (("0.26",), True, False)}


def test_a_process_in_which_vllm_did_not_call_the_plugin_says_so() -> None:
    assert registration.NOT_REGISTERED.code == "not_registered"
    assert not registration.NOT_REGISTERED.lora_is_right


def test_a_misspelt_setting_stops_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_status", registration.NOT_REGISTERED)
    monkeypatch.setenv(registration.SETTING, "offf")

    with pytest.raises(ValueError, match="TENANTRY_KERNELS is 'offf'"):
        registration.register()


PROBE = """
import vllm.model_executor.layers.fused_moe.oracle.unquantized as oracle
from vllm.lora.model_manager import LoRAModelManager
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from lora_kernels.vllm_plugin import register, status

def seen():
    return (current_platform.get_punica_wrapper(), oracle.backend_to_kernel_cls,
            LoRAModelManager._deactivate_adapter, LoRAModelManager._create_lora_modules)

stock = seen()
assert status().code == "not_registered", status()
load_general_plugins()
first = seen()
register()
print(status().code, first == stock, seen() == first)
"""


@pytest.mark.engine
@pytest.mark.parametrize(("setting", "answer"), [("on", "active False True"), ("off", "off True True")])
def test_vllm_itself_calls_the_plugin_once_and_off_changes_nothing(setting: str, answer: str) -> None:
    probe = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, registration.SETTING: setting},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert answer in probe.stdout, probe.stderr
