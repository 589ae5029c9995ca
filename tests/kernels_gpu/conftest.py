"""Chooses where the kernels run: on the GPU when there is one, else in Triton's interpreter on the CPU.

Run by `make test-kernels` with a Python of its own; any other Python without triton skips this folder.
"""

import importlib.util
import os
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["*"]
else:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when a kernel is defined

    @pytest.fixture(autouse=True)
    def no_access_outside_of_tensors() -> Iterator[None]:
        """What compute-sanitizer does on a GPU."""
        if os.environ.get("TRITON_INTERPRET") != "1":
            yield
            return
        from bounds import checked_accesses

        with checked_accesses():
            yield
