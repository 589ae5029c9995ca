"""Small models of real layer shapes with random weights, and random adapters for them, for a real vLLM on a GPU.

Two layers and a small vocabulary keep a start short; hidden sizes, experts and heads are those of the published models.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

LAYERS, VOCAB = 2, 2048
COMMON: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "hidden_act": "silu",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gptoss": COMMON
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "initial_context_length": 4096,
        "router_aux_loss_coef": 0.9,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        },
    },
    "qwen3-moe": COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "router_aux_loss_coef": 0.001,
    },
    "qwen3": COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
    },
}
CONFIGS["gptoss-bf16"] = {key: value for key, value in CONFIGS["gptoss"].items() if key != "quantization_config"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and how it is served. moe_backend: by path; vLLM takes other weights for MXFP4 with LoRA than we keep, and so other
    roundings, unless told. experts: the class that serves on our path; "" where the model has none. can_merge: its weights are plain."""

    model: str
    experts: str
    moe_backend: dict[str, str] = field(default_factory=lambda: {"off": "auto", "on": "auto"})
    can_merge: bool = True
    has_router: bool = False
    repeatable: bool = True


CASES = {
    "qwen3-moe": Case(model="qwen3-moe", experts="TritonSeamExperts", has_router=True),
    "gptoss": Case(model="gptoss", experts="OaiLoraExperts", moe_backend={"off": "triton_unfused", "on": "auto"}, can_merge=False),
    "qwen3": Case(model="qwen3", experts=""),
    "gptoss-bf16": Case(model="gptoss-bf16", experts="TritonSeamExperts", has_router=True),
    "gptoss-marlin": Case(model="gptoss", experts="MarlinSeamExperts", moe_backend={"off": "marlin", "on": "marlin"}, can_merge=False),
}


def write_model(folder: Path, name: str) -> Path:
    """A configuration without weights: `load_format="dummy"` with `seed_dummy_weights` makes them on the device."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return folder


def seed_dummy_weights() -> None:
    """From now on vLLM's dummy weights are normal (norms 1), the same for the same shapes in the same order.

    Experts' are smaller: with larger ones each near tie of a router would change an answer more than an adapter does.
    """
    import vllm.model_executor.model_loader.dummy_loader as loader

    @torch.no_grad()
    def fill(layer: torch.nn.Module, *_: Any, **__: Any) -> None:
        for name, parameter in layer.named_parameters(recurse=False):
            if not torch.is_floating_point(parameter):
                if "scale" in name:
                    parameter.fill_(119)
                else:
                    parameter.random_(0, 256)
            elif "norm" in type(layer).__name__.lower():
                parameter.fill_(1.0)
            else:
                parameter.normal_(0, 0.01 if parameter.dim() == 3 else 0.02)

    loader.initialize_dummy_weights = fill


def write_adapter(folder: Path, name: str, *, seed: int, rank: int, strength: float, kind: str = "full") -> Path:
    """A PEFT adapter large enough to change most tokens. kind: of all layers (experts too), of `attention`, or of that and the `router`."""
    from safetensors.torch import save_file

    if (folder / "adapter_config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for key, (rows, columns), scale in _shapes(CONFIGS[name], rank, strength, kind):
        tensors[f"base_model.model.{key}.weight"] = (
            (torch.randn(rows, columns, generator=generator, device=device) * scale).bfloat16().cpu()
        )
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "task_type": "CAUSAL_LM"}
    is_gptoss = name.startswith("gptoss")
    if kind == "router":
        modules.append("router" if is_gptoss else "gate")
    elif kind == "full" and is_gptoss:
        config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    elif kind == "full":
        modules += ["gate_proj", "up_proj", "down_proj"]
    config |= {"target_modules": modules, "base_model_name_or_path": name}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _shapes(config: dict[str, Any], rank: int, strength: float, kind: str) -> Iterator[tuple[str, tuple[int, int], float]]:
    """(name, shape, scale) of every A and B."""
    hidden, heads, kv_heads, size = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    intermediate = config.get("moe_intermediate_size", config["intermediate_size"])
    is_gptoss = config["model_type"] == "gpt_oss"
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        pairs = {
            f"{prefix}.self_attn.q_proj": (hidden, heads * size),
            f"{prefix}.self_attn.k_proj": (hidden, kv_heads * size),
            f"{prefix}.self_attn.v_proj": (hidden, kv_heads * size),
            f"{prefix}.self_attn.o_proj": (heads * size, hidden),
        }
        if kind == "router" and experts:
            pairs[f"{prefix}.mlp.{'router' if is_gptoss else 'gate'}"] = (hidden, experts)
        elif kind == "full" and is_gptoss:
            for key, inputs, outputs in ((".base_layer", hidden, 2 * intermediate), ("", intermediate, hidden)):
                yield f"{prefix}.mlp.experts{key}.lora_A", (rank * experts, inputs), inputs**-0.5
                yield f"{prefix}.mlp.experts{key}.lora_B", (outputs, rank * experts), strength
        elif kind == "full":
            for expert in [f"experts.{number}." for number in range(experts)] if experts else [""]:
                pairs[f"{prefix}.mlp.{expert}gate_proj"] = pairs[f"{prefix}.mlp.{expert}up_proj"] = (hidden, intermediate)
                pairs[f"{prefix}.mlp.{expert}down_proj"] = (intermediate, hidden)
        for key, (inputs, outputs) in pairs.items():
            yield f"{key}.lora_A", (rank, inputs), inputs**-0.5
            yield f"{key}.lora_B", (outputs, rank), strength
