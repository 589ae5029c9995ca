"""A LoRA adapter in memory, over attention and expert weights, and its tensors by the names PEFT gives them."""

from typing import Literal

import torch
from torch import nn
from transformers import Qwen3MoeForCausalLM

Layout = Literal["per_expert", "fused"]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class Lora(nn.Module):
    """Trainable A and B for q, k, v, o and every expert of every layer.

    A is [*experts, rank, in], B is [*experts, out, rank], by weight name. "per_expert" gives gate and up a pair each
    ("...gate_up_proj.gate", "...gate_up_proj.up"); "fused" gives the concatenated gate_up_proj one pair, as PEFT's
    target_parameters does.
    """

    def __init__(self, model: Qwen3MoeForCausalLM, *, rank: int, alpha: int, layout: Layout, seed: int) -> None:
        super().__init__()
        self.rank, self.alpha, self.layout = rank, alpha, layout
        generator = torch.Generator().manual_seed(seed)
        self.pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, weight in model.named_parameters():
            if name.endswith((*(f"{projection}.weight" for projection in ATTENTION), "experts.down_proj")):
                self._add(name, weight.shape, generator)
            elif name.endswith("experts.gate_up_proj"):
                experts, both, hidden = weight.shape
                if layout == "fused":
                    self._add(name, weight.shape, generator)
                else:
                    self._add(f"{name}.gate", (experts, both // 2, hidden), generator)
                    self._add(f"{name}.up", (experts, both // 2, hidden), generator)

    def merged(self, model: Qwen3MoeForCausalLM) -> dict[str, torch.Tensor]:
        """The adapted weights by parameter name, for torch.func.functional_call."""
        deltas = {name: self.alpha / self.rank * (b @ a) for name, (a, b) in self.pairs.items()}
        for name in [name for name in deltas if name.endswith(".gate")]:
            fused = name.removesuffix(".gate")
            deltas[fused] = torch.cat([deltas.pop(name), deltas.pop(f"{fused}.up")], dim=1)
        return {name: model.get_parameter(name) + delta for name, delta in deltas.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The pairs under the names PEFT saves them by."""
        named: dict[str, torch.Tensor] = {}
        for name, (a, b) in self.pairs.items():
            path = f"base_model.model.{name}"
            if name.endswith(".weight"):
                module = path.removesuffix(".weight")
                named[f"{module}.lora_A.weight"], named[f"{module}.lora_B.weight"] = a, b
            elif self.layout == "fused":
                # PEFT wraps gate_up_proj first, so its pair sits under the outer wrapper's base_layer.
                module = (
                    path.removesuffix(".gate_up_proj") + ".base_layer" if name.endswith("gate_up_proj") else path.removesuffix(".down_proj")
                )
                named[f"{module}.lora_A.weight"] = a.reshape(-1, a.shape[-1])  # [E * rank, in], expert-major
                named[f"{module}.lora_B.weight"] = b.permute(1, 2, 0).reshape(b.shape[1], -1)  # [out, rank * E], expert fastest
            else:
                experts_path, projection = _per_expert_name(path)
                for expert in range(a.shape[0]):
                    module = f"{experts_path}.{expert}.{projection}"
                    named[f"{module}.lora_A.weight"], named[f"{module}.lora_B.weight"] = a[expert], b[expert]
        return {name: tensor.detach() for name, tensor in named.items()}

    def _add(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> None:
        *experts, out_features, in_features = shape
        a = nn.Parameter(torch.randn(*experts, self.rank, in_features, generator=generator) / in_features**0.5)
        b = nn.Parameter(torch.zeros(*experts, out_features, self.rank))
        self.pairs[name] = (a, b)
        self.register_parameter(f"{name}.a".replace(".", "_"), a)
        self.register_parameter(f"{name}.b".replace(".", "_"), b)


def _per_expert_name(path: str) -> tuple[str, str]:
    """("....mlp.experts", "gate_proj") for "....mlp.experts.gate_up_proj.gate"."""
    experts_path, _, weight = path.partition(".experts.")
    projection = {"gate_up_proj.gate": "gate_proj", "gate_up_proj.up": "up_proj", "down_proj": "down_proj"}[weight]
    return f"{experts_path}.experts", projection
