"""What the admin plane's routes share: JSON out, and the rule for names that come in."""

import re
from typing import Annotated, Any

import msgspec
from fastapi import Path
from fastapi.responses import Response
from pydantic import AfterValidator, BaseModel, ConfigDict

from shared.contracts.state import NAME_PATTERN

_encode = msgspec.json.Encoder().encode
_NAME = re.compile(NAME_PATTERN)


class Body(BaseModel):
    """A request's JSON body; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not a name: lower-case letters, digits, `-` and `_`, at most 63, a letter or digit first")
    return name


Name = Annotated[str, AfterValidator(check_name)]
NameInPath = Annotated[str, Path(), AfterValidator(check_name)]


def answer(result: Any, status: int = 200) -> Response:
    return Response(_encode(result), status, media_type="application/json")
