"""Decides, once per process, whether vLLM gets our LoRA path, and keeps the answer. What a platform's path changes in
vLLM is that platform's own module; nothing of vLLM or torch is imported before `register` runs."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

SETTING = "TENANTRY_KERNELS"
"""Environment variable: `on`, or `off`, which leaves vLLM as it was. Unset: on where the path is proven, off elsewhere."""


@dataclass(frozen=True, kw_only=True)
class PluginStatus:
    """What the plugin is in this process.

    active: vLLM runs our LoRA path. code: `active`, `not_registered`, `off`, `not_proven`, `platform` or
    `vllm_version`.
    lora_is_right: batches that mix adapters and base rows are answered correctly; without it an engine with adapters
    must not start.
    """

    active: bool
    code: str
    reason: str
    lora_is_right: bool


NOT_REGISTERED = PluginStatus(
    active=False,
    code="not_registered",
    reason="vLLM has not called the plugin in this process: is VLLM_PLUGINS set, or lora-kernels not installed?",
    lora_is_right=False,
)
_status = NOT_REGISTERED


def status() -> PluginStatus:
    """What the plugin did in this process."""
    return _status


def register() -> None:
    """Gives vLLM our LoRA path on a platform and version that have one; any further call changes nothing.

    :raises ValueError: TENANTRY_KERNELS is neither `on` nor `off`.
    """
    global _status
    if _status.active:
        return
    setting = os.environ.get(SETTING, "")
    if setting not in ("", "on", "off"):
        raise ValueError(f"{SETTING} is {setting!r}: it may be 'on' or 'off'")

    import vllm
    from vllm.platforms import current_platform

    platform = current_platform.device_type
    path = _PATHS.get(platform)
    _status = decide(setting=setting, platform=platform, vllm_version=vllm.__version__, path=path)
    if _status.active and path is not None:
        path.install()
    elif _status.code == "not_proven":
        log.info("tenantry lora path: %s", _status.reason)
    elif not _status.lora_is_right:
        log.warning("tenantry lora path is not active: %s", _status.reason)


@dataclass(frozen=True, kw_only=True)
class LoraPath:
    """One platform's path.

    vllm_releases: major.minor, those it was tested with. stock_is_right: vLLM's own path answers correctly. proven: every family of
    models was shown to be answered as vLLM's own kernels and merged weights answer it; until then it serves only where asked for.
    """

    vllm_releases: tuple[str, ...]
    stock_is_right: bool
    proven: bool
    install: Callable[[], None]


def decide(*, setting: str, platform: str, vllm_version: str, path: LoraPath | None) -> PluginStatus:
    """The status that `register` sets, from plain values."""
    if path is None:
        return PluginStatus(
            active=False,
            code="platform",
            reason=f"no path of ours for {platform}: vLLM's own LoRA kernels serve",
            lora_is_right=True,
        )
    stock = "vLLM's own LoRA path serves" if path.stock_is_right else f"vLLM's own LoRA path on {platform} is wrong"
    if setting == "off":
        return PluginStatus(active=False, code="off", reason=f"{SETTING}=off: {stock}", lora_is_right=path.stock_is_right)
    if not setting and not path.proven:
        return PluginStatus(
            active=False,
            code="not_proven",
            reason=f"our {platform} path serves only with {SETTING}=on, until it is proven for every family: {stock}",
            lora_is_right=path.stock_is_right,
        )
    if ".".join(vllm_version.split(".")[:2]) not in path.vllm_releases:
        return PluginStatus(
            active=False,
            code="vllm_version",
            reason=f"vLLM {vllm_version} is not one of {', '.join(path.vllm_releases)}: {stock}",
            lora_is_right=path.stock_is_right,
        )
    return PluginStatus(active=True, code="active", reason=f"our {platform} path on vLLM {vllm_version}", lora_is_right=True)


def _install_cpu() -> None:
    from lora_kernels.vllm_plugin import cpu

    cpu.install()


def _install_gpu() -> None:
    from lora_kernels.vllm_plugin import gpu

    gpu.install()


_PATHS = {
    "cpu": LoraPath(vllm_releases=("0.32",), stock_is_right=False, proven=True, install=_install_cpu),
    "cuda": LoraPath(vllm_releases=("0.26",), stock_is_right=True, proven=False, install=_install_gpu),
}
"""By vLLM's device type; a platform that is not here keeps vLLM's own path."""
