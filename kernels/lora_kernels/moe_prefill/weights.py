"""An expert layer's adapters as the engine stacks them, and the checks every call relies on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from lora_kernels.arguments import DTYPES, check, check_slots, check_tensor
from lora_kernels.moe_prefill.activation import Activation

MAX_RANK = 128


@dataclass(frozen=True, kw_only=True)
class ExpertLora:
    """gate_up_a: one or two [L, E, R, H]. gate_up_b: one [L, E, 2 I, R] interleaved, or two [L, E, I, R].
    down_a: [L, E, R, I]. down_b: [L, E, H, R]. Scaling is folded into B; a lower rank than R is padded with zeros, or told by slot_ranks.

    slot_ranks: [>= L] int32, each adapter's own rank; rows of A beyond it are not read, columns of B only up to the next
    multiple of 8 and times zero. None: all ranks are R.

    An expert dimension of 1 means one factor shared by all experts. Which of the layouts it is follows from the
    activation (`Activation.num_slices`).

    :raises ValueError: a stack's shape, dtype or layout is off; it names the stack, what was expected and given.
    """

    activation: Activation
    gate_up_a: Sequence[torch.Tensor]
    gate_up_b: Sequence[torch.Tensor]
    down_a: torch.Tensor
    down_b: torch.Tensor
    num_experts: int
    slot_ranks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        slices = self.activation.num_slices
        for name, stacks in (("gate_up_a", self.gate_up_a), ("gate_up_b", self.gate_up_b)):
            check(name, f"{slices} stacks for {self.activation}", f"{len(stacks)} stacks", holds=len(stacks) == slices)
        for name, stack in (("down_a", self.down_a), ("down_b", self.down_b)):
            check(name, "4 dimensions", f"shape {list(stack.shape)}", holds=stack.dim() == 4)
        check("down_a", f"a rank of 1 to {MAX_RANK}", self.rank, holds=1 <= self.rank <= MAX_RANK)
        width = self.intermediate_size * (2 if slices == 1 else 1)
        self._check_stacks("gate_up_a", self.gate_up_a, self.rank, self.hidden_size)
        self._check_stacks("gate_up_b", self.gate_up_b, width, self.rank)
        self._check_stacks("down_a", (self.down_a,), self.rank, self.intermediate_size)
        self._check_stacks("down_b", (self.down_b,), self.hidden_size, self.rank)
        check_slots(self.num_adapters, None, self.slot_ranks, device=self.down_b.device)

    def _check_stacks(self, name: str, stacks: Sequence[torch.Tensor], rows: int, columns: int) -> None:
        num_experts = self.num_experts if stacks[0].dim() == 4 and stacks[0].shape[1] != 1 else 1
        for index, stack in enumerate(stacks):
            shape = (self.num_adapters, num_experts, rows, columns)
            dtypes = DTYPES if stack is self.down_b else (self.down_b.dtype,)
            check_tensor(f"{name}[{index}]", stack, shape=shape, dtypes=dtypes, device=self.down_b.device)

    @property
    def num_adapters(self) -> int:
        return self.down_a.shape[0]

    @property
    def rank(self) -> int:
        return self.down_a.shape[2]

    @property
    def block_r(self) -> int:
        """The rank as the kernels tile it."""
        return max(16, triton.next_power_of_2(self.rank))

    @property
    def intermediate_size(self) -> int:
        return self.down_a.shape[3]

    @property
    def hidden_size(self) -> int:
        return self.down_b.shape[2]


def strides(stack: torch.Tensor) -> tuple[int, int]:
    """(adapter stride, expert stride), the latter 0 for a factor shared by all experts."""
    return stack.stride(0), 0 if stack.shape[1] == 1 else stack.stride(1)
