"""Adapters that the real PEFT saves, on the real transformers models: the normalised update is PEFT's own merged one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.artifacts.archive import read_bundle
from shared.artifacts.base_model import describe_base
from shared.artifacts.normalise import normalise
from shared.artifacts.tensors import read_header, read_tensor
from shared.artifacts.validate import validate
from tests.adapter_files import WEIGHTS
from tests.adapters_factory import PREFIX, make_limits

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def tiny_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**SIZES, intermediate_size=48, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
        return transformers.Qwen3MoeForCausalLM(config)
    if kind == "gpt_oss":
        config = transformers.GptOssConfig(**SIZES, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)
        return transformers.GptOssForCausalLM(config)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, intermediate_size=48))


def peft_config(kind: str) -> Any:
    parameters = None if kind == "qwen3" else ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    modules = ["q_proj", "o_proj"] if parameters else "all-linear"
    patterns = {"gate_up_proj": 6, "layers.1.self_attn.q_proj": 3} if parameters else {"down_proj": 5}
    return peft.LoraConfig(
        r=4,
        lora_alpha=10,
        use_rslora=True,
        target_modules=modules,
        target_parameters=parameters,
        rank_pattern=patterns,
        alpha_pattern={"o_proj": 3, "down_proj": 7},
        init_lora_weights=False,
    )


def merged_change(before: dict[str, Any], model: Any) -> dict[str, np.ndarray]:
    """What merging changed, by parameter name."""
    merged = model.merge_and_unload().state_dict()
    change = {name: (merged[name] - before[name]).numpy() for name in before}
    return {name: delta for name, delta in change.items() if delta.any()}


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "qwen3"])
def test_what_peft_saves_normalises_to_what_peft_merges(kind: str, tmp_path: Path):
    model = tiny_model(kind)
    model.save_pretrained(tmp_path / "base")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted = peft.get_peft_model(model, peft_config(kind))
    adapted.save_pretrained(tmp_path / "adapter")
    expected = merged_change(before, adapted)

    base = describe_base(tmp_path / "base", label="tiny", dtype="float32", cache=None)
    bundle = read_bundle(tmp_path / "adapter", tmp_path / "bundle")
    done = normalise(bundle, validate(bundle, base, make_limits()), base, tmp_path / "out")

    path = done.root / WEIGHTS
    tensors = {tensor.name.removeprefix(PREFIX): read_tensor(path, tensor) for tensor in read_header(path)}
    names = {name.rsplit(".lora_", 1)[0] for name in tensors}
    unseen = set(expected)
    for name in names:
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        parameter, delta = _merged_slice(name, expected, base.num_experts)
        unseen.discard(parameter)
        if done.layout == "fused" and ".experts" in name:
            e = base.num_experts
            got = np.einsum("ore,eri->eio", b.reshape(b.shape[0], -1, e), a.reshape(e, -1, a.shape[1]))
        else:
            got = b @ a
        np.testing.assert_allclose(got, delta, atol=2e-5, err_msg=name)
    assert not unseen, "PEFT changed parameters that the normalised adapter does not"


def _merged_slice(name: str, expected: dict[str, np.ndarray], experts: int) -> tuple[str, np.ndarray]:
    """The merged parameter that holds the module's update, and the update's part of it."""
    if ".experts" not in name:
        return f"{name}.weight", expected[f"{name}.weight"]
    prefix, rest = name.split(".experts", 1)
    if rest in ("", ".base_layer"):
        parameter = f"{prefix}.experts.{'gate_up_proj' if rest else 'down_proj'}"
        return parameter, expected[parameter]
    _, expert, leaf = rest.split(".")
    parameter = f"{prefix}.experts.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}"
    whole = expected[parameter][int(expert)]
    half = whole.shape[0] // 2
    part = {"gate_proj": whole[:half], "up_proj": whole[half:], "down_proj": whole}[leaf]
    return parameter, part
