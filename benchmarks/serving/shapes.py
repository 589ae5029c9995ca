"""Published models' shapes: configurations, checkpoint tensors and adapter tensors, as names and sizes alone."""

from collections.abc import Iterator
from typing import Any

RANK = 32
ADAPTERS = 8

_GPTOSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 201088,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initial_context_length": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 200002,
    "pad_token_id": 199999,
    "router_aux_loss_coef": 0.9,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    },
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
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
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "bos_token_id": 151643,
    "router_aux_loss_coef": 0.001,
}
_TINY = _QWEN3 | {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
MODELS = {"gptoss-20b": _GPTOSS, "qwen3-30b-a3b": _QWEN3, "tiny": _TINY}
"""`tiny` shows that a run works, on any machine; its figures say nothing."""

Tensors = Iterator[tuple[str, tuple[int, ...], str]]  # name, shape, safetensors' dtype


def config_of(model: str, layers: int = 0) -> dict[str, Any]:
    """`layers` other than 0 makes a shorter model of the same layers."""
    config = dict(MODELS[model])
    if layers:
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    return config


def checkpoint_tensors(config: dict[str, Any]) -> Tensors:
    """As the published checkpoint lists them: GPT-OSS with fused MXFP4 experts, Qwen3 with one tensor for each expert's matrix."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden), "BF16"
    yield "lm_head.weight", (vocabulary, hidden), "BF16"
    yield "model.norm.weight", (hidden,), "BF16"
    is_gptoss = config["model_type"] == "gpt_oss"
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", (hidden,), "BF16"
        for name, inputs, outputs in _attention(config):
            yield f"{prefix}self_attn.{name}.weight", (outputs, inputs), "BF16"
            if config["attention_bias"]:
                yield f"{prefix}self_attn.{name}.bias", (outputs,), "BF16"
        yield from _gptoss_layer(config, prefix) if is_gptoss else _qwen3_layer(config, prefix)


def adapter_tensors(config: dict[str, Any], rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """A and B of an adapter on attention and experts, as PEFT writes them; A are [rank, inputs], B [outputs, rank]."""
    experts, inner, hidden = _experts(config), _inner(config), config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        pairs = [(f"{prefix}self_attn.{name}", inputs, outputs, rank) for name, inputs, outputs in _attention(config)]
        if config["model_type"] == "gpt_oss":
            pairs += [
                (f"{prefix}mlp.experts.base_layer", hidden, 2 * inner, rank * experts),
                (f"{prefix}mlp.experts", inner, hidden, rank * experts),
            ]
        else:
            for expert in range(experts):
                of_expert = f"{prefix}mlp.experts.{expert}."
                pairs += [(of_expert + name, hidden, inner, rank) for name in ("gate_proj", "up_proj")]
                pairs.append((of_expert + "down_proj", inner, hidden, rank))
        for name, inputs, outputs, ranks in pairs:
            yield f"base_model.model.{name}.lora_A.weight", (ranks, inputs)
            yield f"base_model.model.{name}.lora_B.weight", (outputs, ranks)


def adapter_config(config: dict[str, Any], rank: int, base: str) -> dict[str, Any]:
    """With the version that wrote it: GPT-OSS's experts are square, so that nothing else tells how their axes lie."""
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    found: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "peft_version": "0.21.0"}
    if config["model_type"] == "gpt_oss":
        found["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    else:
        modules += ["gate_proj", "up_proj", "down_proj"]
    return found | {"target_modules": modules, "base_model_name_or_path": base}


def _attention(config: dict[str, Any]) -> list[tuple[str, int, int]]:
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return [("q_proj", hidden, queries), ("k_proj", hidden, keys), ("v_proj", hidden, keys), ("o_proj", queries, hidden)]


def _gptoss_layer(config: dict[str, Any], prefix: str) -> Tensors:
    hidden, inner, experts = config["hidden_size"], _inner(config), _experts(config)
    yield f"{prefix}self_attn.sinks", (config["num_attention_heads"],), "BF16"
    yield f"{prefix}mlp.router.weight", (experts, hidden), "BF16"
    yield f"{prefix}mlp.router.bias", (experts,), "BF16"
    for name, outputs, inputs in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        yield f"{prefix}mlp.experts.{name}_blocks", (experts, outputs, inputs // 32, 16), "U8"
        yield f"{prefix}mlp.experts.{name}_scales", (experts, outputs, inputs // 32), "U8"
        yield f"{prefix}mlp.experts.{name}_bias", (experts, outputs), "BF16"


def _qwen3_layer(config: dict[str, Any], prefix: str) -> Tensors:
    hidden, inner, experts = config["hidden_size"], _inner(config), _experts(config)
    for norm in ("q_norm", "k_norm"):
        yield f"{prefix}self_attn.{norm}.weight", (config["head_dim"],), "BF16"
    yield f"{prefix}mlp.gate.weight", (experts, hidden), "BF16"
    for expert in range(experts):
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}mlp.experts.{expert}.{name}.weight", (inner, hidden), "BF16"
        yield f"{prefix}mlp.experts.{expert}.down_proj.weight", (hidden, inner), "BF16"


def _experts(config: dict[str, Any]) -> int:
    return int(config.get("num_local_experts") or config["num_experts"])


def _inner(config: dict[str, Any]) -> int:
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])
