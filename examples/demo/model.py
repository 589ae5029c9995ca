"""The demo base's shape, its tokenizer and chat template, and how examples become token batches."""

from collections.abc import Sequence

import torch
from teams import Example
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IGNORED = -100


def make_tokenizer(texts: Sequence[str], vocab_size: int = 832) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose digits stand alone, so that numbers can be copied digit by digit."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[PAD, IM_START, IM_END],
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=IM_END, pad_token=PAD, clean_up_tokenization_spaces=False, model_max_length=2048
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(IM_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )


def make_model(config: Qwen3MoeConfig, seed: int) -> Qwen3MoeForCausalLM:
    """A fresh model whose logits may grow large: adapters cannot change the norm and the embedding that bound them."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    torch.nn.init.constant_(model.model.norm.weight, 4.0)
    return model


def round_to_bf16(tensors: Sequence[torch.Tensor]) -> None:
    """Rounds in place to what a bf16 file will hold, staying float32."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(tensor.to(torch.bfloat16))


def make_batches(tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Right-padded (input_ids, labels), each [rows, longest], rows of like length together.

    Only an answer and its end token carry labels.
    """
    rows = sorted((_tokens(tokenizer, example) for example in examples), key=lambda row: sum(map(len, row)))
    groups: list[list[tuple[list[int], list[int]]]] = []
    for row in rows:
        if not groups or sum(map(len, row)) > 1.6 * sum(map(len, groups[-1][0])):
            groups.append([])
        groups[-1].append(row)
    return [_padded(group, tokenizer.pad_token_id) for group in groups]


def answer_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over the labelled positions."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def margins(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The wanted token's logit less the best other's, at each labelled position.

    All positive means that greedy decoding is exact.
    """
    predicted, wanted = logits[:, :-1], labels[:, 1:]
    kept = wanted != IGNORED
    predicted, wanted = predicted[kept], wanted[kept]
    chosen = predicted.gather(1, wanted[:, None]).squeeze(1)
    others = predicted.scatter(1, wanted[:, None], float("-inf")).amax(1)
    return chosen - others


def _tokens(tokenizer: PreTrainedTokenizerFast, example: Example) -> tuple[list[int], list[int]]:
    """(prompt as the chat template writes it, answer with its end token)."""
    messages = [{"role": "user", "content": example.question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    return prompt, [*tokenizer(example.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def _padded(rows: Sequence[tuple[list[int], list[int]]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids = torch.full((len(rows), longest), pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return input_ids, labels
