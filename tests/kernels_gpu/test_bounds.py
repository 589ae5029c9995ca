"""The interpreter's memory checker finds what it is there for."""

import os

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="compute-sanitizer does it on a GPU")


@triton.jit
def copy_kernel(source, target, length, READ: tl.constexpr, WRITE: tl.constexpr):
    place = tl.arange(0, 16)
    tl.store(target + place + WRITE, tl.load(source + place + READ, mask=place < length), mask=place < length)


@pytest.mark.parametrize(
    ("read", "write", "message"),
    [(1, 0, "reads 1 of 10 elements in no tensor, 0 bytes past source"), (0, 2, "writes 2 of 10 elements .* past target"),
     (-3, 0, "reads 3 of 10 elements in no tensor")],
)  # fmt: skip
def test_an_access_outside_of_the_launchs_tensors_is_told(read: int, write: int, message: str) -> None:
    source, target = torch.arange(10.0), torch.zeros(10)
    with pytest.raises(Exception, match=message):
        copy_kernel[(1,)](source, target, 10, READ=read, WRITE=write)


def test_masked_lanes_may_point_anywhere() -> None:
    source, target = torch.arange(10.0), torch.zeros(10)
    copy_kernel[(1,)](source, target, 10, READ=0, WRITE=0)
    assert torch.equal(source, target)
    copy_kernel[(1,)](source, target, 4, READ=6, WRITE=0)
    assert torch.equal(target[:4], source[6:])
