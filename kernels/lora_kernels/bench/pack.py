"""`python -m lora_kernels.bench.pack FOLDER [--commit HEAD]`: a commit's kernels, tests and Makefile, to be copied to a GPU box."""

import argparse
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

from lora_kernels.bench.revision import ROOT, STAMP, digest

PACKED = ("kernels", "tests/kernels_gpu", "Makefile")


def pack(folder: Path, commit: str) -> str:
    """Fills the folder and returns the commit's short id.

    :raises subprocess.CalledProcessError: git does not know the commit.
    """
    short = subprocess.run(["git", "rev-parse", "--short", commit], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    archive = subprocess.run(["git", "archive", short, *PACKED], cwd=ROOT, capture_output=True, check=True).stdout
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    (folder / STAMP).write_text(json.dumps({"commit": short, "digest": digest(folder)}) + "\n")
    return short


def main() -> int:
    parser = argparse.ArgumentParser(prog="lora_kernels.bench.pack", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commit", default="HEAD")
    chosen = parser.parse_args()
    sys.stdout.write(f"{pack(chosen.folder, chosen.commit)} in {chosen.folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
