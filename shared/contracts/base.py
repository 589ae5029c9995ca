"""The conversation about base models: what a worker says of the base it serves, and what validation needs to know of it."""

import msgspec


class Module(msgspec.Struct, frozen=True, kw_only=True):
    """One linear layer that an adapter may target, by its checkpoint path without `.weight`.

    `experts` is 0 for a dense layer; for an expert layer the path has the expert number left out
    (`model.layers.0.mlp.experts.gate_proj`, weight of each expert: [out_features, in_features]).
    """

    path: str
    in_features: int
    out_features: int
    experts: int = 0


class BaseDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What the registry checks adapters against, made by the worker from the base's files alone."""

    identity: str  # "<label>@<64 hex digits>": digest over architecture, tokenizer, dtype, quantisation and weight contents
    label: str  # the name people use, e.g. "qwen3-moe-demo"; never matched fuzzily
    architecture: str  # e.g. "Qwen3MoeForCausalLM"
    model_type: str  # e.g. "qwen3_moe"
    dtype: str  # the engine's compute dtype: "float32" | "float16" | "bfloat16"
    quantization: str = "none"
    hidden_size: int = 0
    num_layers: int = 0
    num_experts: int = 0
    experts_layout: str = "none"  # none | split (gate and up apart) | concatenated | interleaved (GPT-OSS)
    modules: tuple[Module, ...] = ()

    @property
    def digest(self) -> str:
        return self.identity.rsplit("@", 1)[-1]


class KvGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep one sequence's keys and values in blocks of their own, out of the one pool."""

    block_tokens: int
    most_tokens: int = 0  # of a sequence that they keep at once (a sliding window and what one step adds); 0: all


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker's engine can hold. Slots are preallocated: their bytes are charged whatever an adapter's true size."""

    slots: int  # max_loras
    max_rank: int
    bytes_per_rank: int  # slot bytes for one unit of rank over all modules; a slot costs rank_class * bytes_per_rank
    rank_classes: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those up to max_rank count
    max_model_len: int = 0
    max_num_seqs: int = 0
    endpoints: tuple[str, ...] = ()  # OpenAI paths that this engine serves, e.g. "/v1/chat/completions"
    kv_blocks: int = 0  # of the KV cache; 0: unknown
    kv_block_tokens: int = 0
    kv_block_bytes: int = 0  # over all layers
    kv_groups: tuple[KvGroup, ...] = ()  # empty: one, of kv_block_tokens, that keeps whole sequences
    max_batched_tokens: int = 0  # prefill and decode tokens of one step
