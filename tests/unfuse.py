"""An adapter in the fused-experts PEFT layout, written out per expert: apart from the product's own conversion, to check it."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def unfused(source: Path, target: Path) -> Path:
    """A is (experts * r, in), expert-major; B is (out, r * experts), the expert index fastest; gate stands above up."""
    config = json.loads((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    experts = json.loads((source.parents[1] / "base" / "config.json").read_text())["num_experts"]
    out: dict[str, torch.Tensor] = {}
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        b = tensors[name.replace(".lora_A.", ".lora_B.")]
        module = name.removesuffix(".lora_A.weight")
        if not module.endswith((".experts", ".experts.base_layer")):
            out[name], out[name.replace(".lora_A.", ".lora_B.")] = a, b
            continue
        rank = a.shape[0] // experts
        gate_up = module.endswith(".base_layer")
        stem = module.removesuffix(".base_layer")
        for expert in range(experts):
            own_a = a[expert * rank : (expert + 1) * rank].contiguous()
            own_b = b[:, expert::experts].contiguous()
            halves = {"gate_proj": own_b[: len(own_b) // 2], "up_proj": own_b[len(own_b) // 2 :]} if gate_up else {"down_proj": own_b}
            for leaf, half in halves.items():
                out[f"{stem}.{expert}.{leaf}.lora_A.weight"] = own_a.clone()
                out[f"{stem}.{expert}.{leaf}.lora_B.weight"] = half.clone().contiguous()
    target.mkdir(parents=True)
    save_file(out, target / "adapter_model.safetensors", metadata={"format": "pt"})
    leaves = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in out})
    (target / "adapter_config.json").write_text(json.dumps(config | {"target_parameters": None, "target_modules": leaves}))
    return target
