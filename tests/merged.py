"""The reference for "what must this adapter answer?": a base with a PEFT adapter's weights added in, greedy, float32.

Written apart from the product's own reading of PEFT files, so that a misreading there cannot hide here.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

PREFIX = "base_model.model."
EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<projection>gate_proj|up_proj|down_proj)")


def load_base(base_dir: Path) -> PreTrainedModel:
    """The base in float32, ready for `greedy`."""
    model = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32, local_files_only=True)
    return model.eval().requires_grad_(requires_grad=False)


def load_tokenizer(base_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(base_dir, local_files_only=True)


def merged_model(base_dir: Path, adapter_dir: Path) -> PreTrainedModel:
    """A fresh base with the adapter's weights added.

    Takes linear modules, and Qwen3-MoE experts in the per-expert or the fused layout; any rank_pattern, alpha_pattern, rsLoRA and dtype.

    :raises ValueError: for a tensor that no parameter of the base takes, and for DoRA, bias or modules_to_save.
    """
    model = load_base(base_dir)
    for parameter_name, expert, rows, delta in _deltas(model, Path(adapter_dir)):
        parameter = model.get_parameter(parameter_name)
        if expert is not None and expert >= parameter.shape[0]:
            raise ValueError(f"{parameter_name} has no expert {expert}")
        target = parameter if expert is None else parameter[expert]
        target = target if rows is None else target[rows]
        if target.shape != delta.shape:
            raise ValueError(f"{parameter_name}: the adapter's {tuple(delta.shape)} does not fit {tuple(target.shape)}")
        target += delta
    return model


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], max_tokens: int) -> list[int]:
    """The answer's token ids, at most `max_tokens`, without the end token."""
    prompt = torch.tensor([prompt_ids(tokenizer, messages)])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    answer = output[0, prompt.shape[1] :].tolist()
    return answer[: answer.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in answer else answer


def _deltas(model: PreTrainedModel, adapter_dir: Path) -> list[tuple[str, int | None, slice | None, torch.Tensor]]:
    """What to add: (parameter name, expert index or None, rows of it or None for all, delta)."""
    config = json.loads((adapter_dir / "adapter_config.json").read_text())
    unsupported = [field for field in ("use_dora", "modules_to_save", "lora_bias") if config.get(field)]
    if unsupported or config.get("bias", "none") != "none":
        raise ValueError(f"not LoRA weights only: {unsupported or 'bias'}")
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    names = frozenset(tensors)
    parameters = dict(model.named_parameters())
    found = []
    for key in [key for key in sorted(names) if key.endswith(".lora_A.weight")]:
        a = tensors.pop(key).to(torch.float32)
        b = tensors.pop(key.replace(".lora_A.", ".lora_B.")).to(torch.float32)
        path = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        expert = EXPERT.fullmatch(path)
        if path.removesuffix(".base_layer").endswith(".experts"):
            both = f"{PREFIX}{path}.base_layer.lora_A.weight" in names
            name = _fused_parameter(path, a, b, config, parameters, both=both)
            experts = parameters[name].shape[0]
            a = a.reshape(experts, -1, a.shape[1])  # rows are expert-major
            b = b.reshape(b.shape[0], -1, experts)  # columns have the expert index fastest
            delta = torch.einsum("ore,eri->eoi", b, a) * _scaling(config, name, a.shape[1])
            found.append((name, None, None, delta))
        elif expert is not None and f"{expert['experts']}.down_proj" in parameters:
            delta = b @ a * _scaling(config, path, a.shape[0])
            inner = delta.shape[0]
            fused, rows = {
                "down_proj": ("down_proj", None),
                "gate_proj": ("gate_up_proj", slice(0, inner)),
                "up_proj": ("gate_up_proj", slice(inner, None)),
            }[expert["projection"]]
            found.append((f"{expert['experts']}.{fused}", int(expert["index"]), rows, delta))
        elif f"{path}.weight" in parameters:
            found.append((f"{path}.weight", None, None, b @ a * _scaling(config, path, a.shape[0])))
        else:
            raise ValueError(f"the base has no module {path}")
    if tensors:
        raise ValueError(f"tensors that are not LoRA pairs: {sorted(tensors)[:3]}")
    return found


def _fused_parameter(
    path: str,
    a: torch.Tensor,
    b: torch.Tensor,
    config: dict[str, Any],
    parameters: dict[str, torch.nn.Parameter],
    *,
    both: bool,
) -> str:
    """The expert parameter that a fused pair adapts.

    PEFT wraps the parameters in the order in which the module defines them (gate_up_proj, then down_proj), so the first
    sits under `base_layer`; a single one has no `base_layer`, and then only target_parameters tells which it is.
    """
    if path.endswith(".base_layer"):
        return path.removesuffix(".base_layer") + ".gate_up_proj"
    if both:
        return f"{path}.down_proj"
    fits = [
        f"{path}.{name}"
        for name in ("gate_up_proj", "down_proj")
        if parameters[f"{path}.{name}"].shape[1:] == (b.shape[0], a.shape[1])
        and any(target.endswith(name) for target in config["target_parameters"])
    ]
    if len(fits) != 1:
        raise ValueError(f"cannot tell which expert weight {path} adapts: {fits}")
    return fits[0]


def _scaling(config: dict[str, Any], path: str, rank: int) -> float:
    patterns = config.get("alpha_pattern") or {}
    alpha = next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", path)), config["lora_alpha"])
    return alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
