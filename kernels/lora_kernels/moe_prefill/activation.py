"""The activations between a layer's two projections: SwiGLU, and GPT-OSS's clamped one with gate and up interleaved."""

from enum import Enum

import triton
import triton.language as tl


class Activation(Enum):
    """What is applied to (gate, up), and how the two lie in w13's output."""

    SWIGLU = "swiglu"
    """silu(gate) * up; gate in the first half of a row, up in the second. A and B are two stacks each ("2D")."""

    GPT_OSS = "gpt_oss"
    """(up + 1) * gate * sigmoid(1.702 gate), gate at most 7, up within 7 of 0; gate, up, gate, up, … in a row. One A and
    one B, whose rows are interleaved likewise ("3D")."""

    @property
    def num_slices(self) -> int:
        return 1 if self is Activation.GPT_OSS else 2


@triton.jit
def activate(gate, up, GPT_OSS: tl.constexpr, FAST: tl.constexpr):
    """float32 in, float32 out. FAST: the sigmoid by one hardware tanh (within 2.5e-4), which the interpreter does not have."""
    if GPT_OSS:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        scaled = 1.702 * gate
    else:
        scaled = gate
    if FAST:
        tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [0.5 * scaled], dtype=tl.float32, is_pure=True, pack=1)
        return gate * (0.5 * tanh + 0.5) * up
    return gate / (1.0 + tl.exp(-scaled)) * up
