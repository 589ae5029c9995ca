"""Makes adapters of a router reach it.

vLLM holds the router's gate twice, on the block and inside the MoE runner, which is the one that computes. It wraps the
first and, the experts having been wrapped in between, hangs the second wrapper where nothing reads it: an adapter's router
weights are loaded and do nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager


def serve_router_adapters() -> None:
    """From now on every manager of this process gives the runners the wrapped gates. Call it once."""
    from vllm.lora.model_manager import LoRAModelManager

    create = LoRAModelManager._create_lora_modules

    def create_and_connect(self: LoRAModelManager) -> None:
        create(self)
        _connect_gates(self)

    LoRAModelManager._create_lora_modules = create_and_connect


def _connect_gates(manager: "LoRAModelManager") -> None:
    """:raises NotImplementedError: a runner multiplies two gates in one product, past their wrappers."""
    from vllm.lora.layers import FusedMoEWithLoRA

    wrappers = {id(module.base_layer): module for module in manager.modules.values()}
    for module in manager.modules.values():
        if not isinstance(module, FusedMoEWithLoRA):
            continue
        runner = module.base_layer
        if runner._fse_fuse_gate:
            raise NotImplementedError("LoRA on a model whose router and shared-expert gates are one product")
        for name, child in list(runner.named_children()):
            if id(child) in wrappers:
                setattr(runner, name, wrappers[id(child)])
