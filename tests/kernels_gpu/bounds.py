"""A memory checker for machines without a GPU: in Triton's interpreter, every access must lie within a tensor that the launch was given."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter


class Ranges:
    """Address ranges of a launch's tensors, by start."""

    def __init__(self, kernel: str, tensors: dict[str, torch.Tensor]) -> None:
        self._kernel = kernel
        given = [(name, tensor) for name, tensor in tensors.items() if tensor.numel()]
        given.sort(key=lambda one: one[1].data_ptr())
        self._names = [name for name, _ in given]
        self._starts = np.array([tensor.data_ptr() for _, tensor in given], dtype=np.uint64)
        sizes = [_extent(tensor) * tensor.element_size() for _, tensor in given]
        # The same tensor may be given twice, and a view beside its base: an address is fine below the largest end so far.
        self._ends = np.maximum.accumulate(self._starts + np.array(sizes, dtype=np.uint64))

    def check(self, what: str, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
        """:raises IndexError: an address that the mask lets through is in no tensor."""
        addresses, mask = np.broadcast_arrays(addresses, mask)
        used = addresses[mask.astype(bool)].astype(np.uint64)
        if not used.size:
            return
        place = np.searchsorted(self._starts, used, side="right") - 1
        bad = (place < 0) | (used + np.uint64(size) > self._ends[np.maximum(place, 0)])
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            behind = self._names[max(int(place[first]), 0)]
            beyond = int(used[first]) - int(self._ends[max(int(place[first]), 0)])
            raise IndexError(f"{self._kernel} {what} {int(bad.sum())} of {used.size} elements in no tensor, {beyond} bytes past {behind}")


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one."""
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


@contextmanager
def checked_accesses() -> Iterator[None]:
    """While it lasts, a launch that reads or writes outside of its tensors raises."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    before = {name: getattr(builder, name) for name in names}
    init_args = executor._init_args_hst
    ranges: list[Ranges] = []

    def remember(self: Any, args: Any, kwargs: Any) -> Any:
        host, named = init_args(self, args, kwargs)
        all_named = dict(zip(self.arg_names, host, strict=False)) | named
        ranges[:] = [Ranges(self.fn.__name__, {name: one for name, one in all_named.items() if isinstance(one, torch.Tensor)})]
        return host, named

    def size_of(pointers: Any) -> int:
        return max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        ranges[0].check("reads", pointers.data, mask.data, size_of(pointers))
        return before["create_masked_load"](self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        ranges[0].check("writes", pointers.data, mask.data, size_of(pointers))
        return before["create_masked_store"](self, pointers, value, mask, *rest)

    def rmw(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        ranges[0].check("changes", pointers.data, mask.data, size_of(pointers))
        return before["create_atomic_rmw"](self, op, pointers, value, mask, *rest)

    def cas(self: Any, pointers: Any, *rest: Any) -> Any:
        ranges[0].check("changes", pointers.data, np.ones_like(pointers.data, dtype=bool), size_of(pointers))
        return before["create_atomic_cas"](self, pointers, *rest)

    executor._init_args_hst = remember
    for name, replacement in zip(names, (load, store, rmw, cas), strict=True):
        setattr(builder, name, replacement)
    try:
        yield
    finally:
        executor._init_args_hst = init_args
        for name, original in before.items():
            setattr(builder, name, original)
