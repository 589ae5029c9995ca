"""Compiles a Triton kernel for compute capability 9.0, with or without a GPU, and counts what its machine code holds."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

BINARIES = Path(triton.backends.nvidia.__file__).parent / "bin"


def machine_code(kernel: JITFunction, constants: Mapping[str, object], types: Mapping[str, str], *, num_warps: int) -> dict[str, object]:
    """types: of arguments that are no constants: "*bf16" where a name ends in _ptr and is not here, else "i32".

    Pointers are aligned to 16 bytes, as torch allocates them; lengths are unspecialised.
    """
    signature: dict[str, str] = {}
    values, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[(index,)] = constants[name]
        else:
            signature[name] = types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
            if signature[name].startswith("*"):
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "launch_pdl": True})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        code, usage = (
            subprocess.run([str(BINARIES / "cuobjdump"), flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found
    return {
        "kernel": kernel.__name__,
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "shared_bytes": binary.metadata.shared,
        "two_byte_accesses": len(re.findall(r"(?:LDG|STG)\.E\.[A-Z.]*U16", code)),
        "async_copies": len(re.findall(r"LDGSTS", code)),
        "warpgroup_products": len(re.findall(r"HGMMA", code)),
    }
