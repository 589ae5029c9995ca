"""The tests' merged-weights reference reads adapters as PEFT itself does, in every form that it claims to take."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from tests.merged import load_base, merged_model

BASE = Path(__file__).parents[2] / "examples" / "demo" / "base"
PROMPT = torch.tensor([[1, 90, 91, 300, 2, 1, 77]])
ATTENTION = ["q_proj", "v_proj", "o_proj"]
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small gains nothing from more, and on a busy machine they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ATTENTION},
        {"target_modules": ATTENTION, "use_rslora": True},
        {"target_modules": ATTENTION, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 7}},
        {"target_modules": r".*\.layers\.[02]\.self_attn\.k_proj"},
        {"target_modules": ATTENTION, "target_parameters": [DOWN, GATE_UP]},
        {"target_modules": ATTENTION, "target_parameters": [GATE_UP, DOWN], "use_rslora": True},
        {"target_modules": [], "target_parameters": [DOWN]},
        {"target_modules": [], "target_parameters": [GATE_UP]},
        {
            "target_modules": [],
            "target_parameters": [GATE_UP, DOWN],
            "rank_pattern": {"down_proj": 1},
            "alpha_pattern": {"experts.gate_up_proj": 9},
        },
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.* keys did not match any targeted module:RuntimeWarning")  # PEFT says so and yet applies them
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_reference_gives_the_logits_that_peft_gives(fields: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    save_random_adapter(tmp_path, fields, dtype)
    by_peft = PeftModel.from_pretrained(load_base(BASE), tmp_path).eval()
    with torch.inference_mode():
        expected, got, plain = (model(PROMPT).logits for model in (by_peft, merged_model(BASE, tmp_path), load_base(BASE)))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
    assert (got - plain).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.mlp.experts.9.up_proj", "has no expert 9"),
        ("model.layers.7.self_attn.q_proj", "no module model.layers.7.self_attn.q_proj"),
        ("model.layers.0.self_attn.q_proj", "does not fit"),
    ],
)
def test_an_adapter_that_does_not_fit_the_base_is_an_error(name: str, message: str, tmp_path: Path) -> None:
    save_random_adapter(tmp_path, {"target_modules": ATTENTION}, torch.float32)
    pair = {f"base_model.model.{name}.lora_A.weight": torch.ones(4, 128), f"base_model.model.{name}.lora_B.weight": torch.ones(32, 4)}
    save_file(pair, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=message):
        merged_model(BASE, tmp_path)


def save_random_adapter(folder: Path, fields: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = get_peft_model(load_base(BASE), LoraConfig(r=4, lora_alpha=8, **fields))
    model.save_pretrained(folder)
    path = folder / "adapter_model.safetensors"
    random_tensors = {name: (torch.randn(tensor.shape) * 0.2).to(dtype) for name, tensor in load_file(path).items()}
    save_file(random_tensors, path)
