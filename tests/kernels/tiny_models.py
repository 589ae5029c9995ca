"""Tiny random Qwen3 and Qwen3-MoE models and PEFT adapters for them, on disk, and their merged-weights reference."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 64, 2, 4, 2, 32
INTERMEDIATE, EXPERTS, TOP_K, EXPERT_INTERMEDIATE = 128, 8, 2, 32
RANK, ALPHA = 8, 16

Shapes = dict[str, tuple[int, int]]
"""(input size, output size) by module path."""


def make_model(folder: Path, *, moe: bool, seed: int = 1) -> PreTrainedModel:
    """Writes a float32 model whose greedy choices have wide margins, and returns it."""
    common = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    if moe:
        model: PreTrainedModel = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                moe_intermediate_size=EXPERT_INTERMEDIATE,
                num_experts=EXPERTS,
                num_experts_per_tok=TOP_K,
                decoder_sparse_step=1,
                norm_topk_prob=True,
                mlp_only_layers=[],
                **common,
            )
        )
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                scale = 1.0 if "embed" in name else 1.2 / weight.shape[-1] ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    model = model.to(torch.float32).eval()
    model.save_pretrained(folder)
    return model


def attention(*names: str) -> Shapes:
    """Shapes of the named attention projections of every layer."""
    outputs = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    return {
        f"model.layers.{layer}.self_attn.{name}": ((HEADS * HEAD_DIM, HIDDEN) if name == "o_proj" else (HIDDEN, outputs[name]))
        for layer in range(LAYERS)
        for name in names
    }


def mlp() -> Shapes:
    """Shapes of the dense feed-forward projections of every layer."""
    sizes = _feed_forward(INTERMEDIATE)
    return {f"model.layers.{layer}.mlp.{name}": size for layer in range(LAYERS) for name, size in sizes.items()}


def experts() -> Shapes:
    """Shapes of every expert's projections of every layer."""
    sizes = _feed_forward(EXPERT_INTERMEDIATE)
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}": size
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for name, size in sizes.items()
    }


def router() -> Shapes:
    """Shapes of every layer's router."""
    return {f"model.layers.{layer}.mlp.gate": (HIDDEN, EXPERTS) for layer in range(LAYERS)}


def head() -> Shapes:
    """Shape of the output head."""
    return {"lm_head": (HIDDEN, VOCAB)}


def embedding() -> Shapes:
    """Shape of the token embedding, a linear layer over one-hot tokens."""
    return {"model.embed_tokens": (VOCAB, HIDDEN)}


def make_adapter(folder: Path, shapes: Shapes, *, seed: int, zero: tuple[str, ...] = (), rank: int = RANK, scale: float = 1.0) -> Path:
    """Writes a PEFT adapter with a large random effect; modules whose last name is in `zero` get a zero B."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (num_inputs, num_outputs) in shapes.items():
        a = torch.randn(rank, num_inputs, generator=generator) / num_inputs**0.5
        b = torch.randn(num_outputs, rank, generator=generator) / rank**0.5 * scale
        name_a, name_b = _tensor_names(module)
        tensors[name_a] = a
        tensors[name_b] = b * (module.rpartition(".")[2] not in zero)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": ALPHA * rank // RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module in shapes}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(model: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """A copy of the model with the adapter's B A alpha / r added to its weights."""
    model = copy.deepcopy(model)
    tensors = load_file(adapter / "adapter_model.safetensors")
    modules = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
    with torch.no_grad():
        for module in modules:
            name_a, name_b = _tensor_names(module)
            delta = tensors[name_b].double() @ tensors[name_a].double() * (ALPHA / RANK)
            is_table = module.endswith("embed_tokens")
            _weight(model, module).add_((delta.t() if is_table else delta).float())
    return model


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The model's own greedy continuation, end-of-sequence tokens ignored."""
    tokens = torch.tensor([prompt])
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = model(tokens, use_cache=False).logits[0, -1]
            tokens = torch.cat((tokens, logits.argmax().view(1, 1)), dim=1)
    torch.set_num_threads(num_threads)
    return tokens[0, len(prompt) :].tolist()


def _feed_forward(intermediate: int) -> Shapes:
    return {
        "gate_proj": (HIDDEN, intermediate),
        "up_proj": (HIDDEN, intermediate),
        "down_proj": (intermediate, HIDDEN),
    }


def _tensor_names(module: str) -> tuple[str, str]:
    prefix = f"base_model.model.{module}"
    if module.endswith("embed_tokens"):
        return f"{prefix}.lora_embedding_A", f"{prefix}.lora_embedding_B"
    return f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight"


def _weight(model: PreTrainedModel, module: str) -> torch.Tensor:
    """The module's weight; an expert's is a view into the model's fused tensors."""
    parent, _, projection = module.rpartition(".")
    experts_path, separator, expert = parent.rpartition(".experts.")
    if not separator:
        return model.get_submodule(module).weight
    fused = model.get_submodule(f"{experts_path}.experts")
    if projection == "down_proj":
        return fused.down_proj[int(expert)]
    gate_up = fused.gate_up_proj[int(expert)]
    half = gate_up.shape[0] // 2
    return gate_up[:half] if projection == "gate_proj" else gate_up[half:]
