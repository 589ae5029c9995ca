"""Which commit the measured code is, also where there is no git: on a GPU box to which an archive was copied."""

import hashlib
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
STAMP = "kernels/PACKED"
"""Written into an archive: its commit, and the digest of its files."""
MEASURED = ("kernels/lora_kernels", "tests/kernels_gpu")
SUFFIXES = (".py", ".json", ".ini")


def revision(root: Path = ROOT) -> str:
    """A short commit id; with "-dirty" where the files are not that commit's; "unknown" without git and stamp."""
    stamp = root / STAMP
    if stamp.exists():
        packed = json.loads(stamp.read_text())
        return packed["commit"] + ("" if packed["digest"] == digest(root) else "-dirty")
    commit = _git(root, "rev-parse", "--short", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("-dirty" if _git(root, "status", "--porcelain", "--", *MEASURED) else "")


def digest(root: Path) -> str:
    """Of the names and contents of the code and its tests."""
    hashed = hashlib.sha256()
    files = [file for folder in MEASURED for file in (root / folder).rglob("*") if file.suffix in SUFFIXES]
    for file in sorted(files):
        hashed.update(str(file.relative_to(root)).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return hashed.hexdigest()


def _git(root: Path, *arguments: str) -> str:
    try:
        ran = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""
