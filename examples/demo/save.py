"""Writes the base as a Hugging Face checkpoint with one tensor per expert, and the adapters as PEFT folders."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from lora import ATTENTION, Lora
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeForCausalLM

BASE_LABEL = "tenantry/qwen3-moe-demo"


def save_base(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_checkpoint_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_diff_dict()
    config["num_experts"] = config.pop("num_local_experts")  # as published checkpoints have it
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16", "_name_or_path": BASE_LABEL}
    config |= {
        "hidden_act": "silu",
        "rms_norm_eps": model.config.rms_norm_eps,
        "rope_theta": 10000.0,
        "attention_bias": False,
    }
    _write_json(folder / "config.json", config)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The class name that every transformers release of the last years can load.
    path = folder / "tokenizer_config.json"
    _write_json(path, json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"})


def save_adapter(lora: Lora, folder: Path, *, revision: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in lora.tensors().items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    fused = lora.layout == "fused"
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE_LABEL,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(ATTENTION) if fused else [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if fused else None,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    _write_json(folder / "adapter_config.json", config)


def _checkpoint_tensors(model: Qwen3MoeForCausalLM) -> dict[str, torch.Tensor]:
    """Parameters in bf16 by the names of published Qwen3-MoE checkpoints, which keep each expert's matrices apart."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().to(torch.bfloat16)
        fused = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
        if fused is None:
            tensors[name] = weight.contiguous()
            continue
        for expert, matrix in enumerate(weight):
            if fused[2] == "down_proj":
                tensors[f"{fused[1]}.{expert}.down_proj.weight"] = matrix.contiguous()
            else:
                gate, up = matrix.chunk(2)
                tensors[f"{fused[1]}.{expert}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{fused[1]}.{expert}.up_proj.weight"] = up.contiguous()
    return tensors


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
