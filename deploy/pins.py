"""Writes constraints/{base,cpu,dev}.txt: exact pins of what the present .venv holds, each package in the first file that needs it.

Run with .venv's own Python (`make pins`) after changing a dependency there. base.txt is the closure of the project's
dependencies, cpu.txt what the CPU engine needs besides, dev.txt what the tests and tools need besides.
"""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
BUILD = ("pip", "setuptools")
# vLLM asks for these and this project's use of it does not; the first three also break its import beside a CPU torch
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "opencv-python-headless", "triton"}
OWN = {"tenantry", "lora-kernels"}
ONLY_X86 = {"intel-openmp", "intel-cmplr-lib-ur"}

HEADS = {
    "base": "What the services need.",
    "cpu": "What the CPU engine needs besides; installed without its own requirements (they pull in a torchvision that breaks it).",
    "dev": "What the tests and tools need besides.",
}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(roots: list[Requirement], installed: dict[str, importlib.metadata.Distribution]) -> set[str]:
    """Canonical names of everything the roots need here, themselves included.

    :raises LookupError: a needed package is not installed.
    """
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(canonical(root.name), frozenset(root.extras)) for root in roots]
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen or name in LEFT_OUT | OWN:
            continue
        seen.add((name, extras))
        if name not in installed:
            raise LookupError(f"{name} is needed and not installed here")
        found.add(name)
        for text in installed[name].requires or []:
            requirement = Requirement(text)
            wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))
            if wanted:
                todo.append((canonical(requirement.name), frozenset(requirement.extras)))
    return found


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    installed = {canonical(found.metadata["Name"]): found for found in importlib.metadata.distributions()}
    groups = {
        "base": [*project["dependencies"], *BUILD],
        "cpu": extras["worker-cpu"],
        "dev": extras["dev"],
    }
    written: set[str] = set()
    for group, roots in groups.items():
        names = closure([Requirement(root) for root in roots], installed) - written
        written |= names
        lines = [f"# {HEADS[group]} Written by `make pins`."]
        for name in sorted(names):
            version = installed[name].version.split("+")[0]
            marker = ' ; platform_machine == "x86_64"' if name in ONLY_X86 else ""
            lines.append(f"{name}=={version}{marker}")
        (ROOT / "constraints" / f"{group}.txt").write_text("\n".join(lines) + "\n")
        sys.stdout.write(f"constraints/{group}.txt: {len(names)} packages\n")


if __name__ == "__main__":
    main()
