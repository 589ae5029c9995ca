"""The root of every subject and the rule for ids in them; each conversation builds its own subjects from these."""

import re

ROOT = "tenantry.v1"
_TOKEN = re.compile(r"[A-Za-z0-9_-]+")


def token(value: str) -> str:
    """`value` if it can stand as one subject token, else ValueError: ids come from us, so this is a broken promise."""
    if not _TOKEN.fullmatch(value):
        raise ValueError(f"not a subject token: {value!r}")
    return value
