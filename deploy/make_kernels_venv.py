"""Makes .venv-kernels, where the Triton kernels' tests run: apart from .venv, because vLLM for CPUs must not find triton.

Like make_venv.py, whose steps and messages it uses with files of its own; standard library only.
"""

from __future__ import annotations

import sys

import make_venv as base

base.VENV = base.ROOT / ".venv-kernels"
base.LOG = base.VENV / "install.log"
base.STAMP = base.VENV / "installed.sha256"
base.CONSTRAINTS = [base.ROOT / "constraints" / "kernels.txt"]
base.NEEDED_BYTES = 2_500_000_000
base.SIZE = "about 1.5 GB, half a minute and more"


def install():
    def make(step):
        base.run(step, [sys.executable, "-m", "venv", str(base.VENV)])
        return base.VENV.name

    def packages(step):
        base.run(step, base.pip("--no-deps", "-r", str(base.CONSTRAINTS[0])), expected=len(base.pins()))
        return f"{len(base.pins())} pinned packages"

    steps = [("environment", make), ("torch", base.install_torch), ("packages", packages)]
    for number, (title, action) in enumerate(steps, 1):
        step = base.Step(number, len(steps), title)
        try:
            step.show(action(step), end=True)
        except base.subprocess.CalledProcessError as error:
            step.show("failed", end=True)
            raise base.Failed(base.explain(title, error.output or "")) from error


base.install = install

if __name__ == "__main__":
    sys.exit(base.main())
