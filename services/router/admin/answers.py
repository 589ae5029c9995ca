"""What the admin plane's routes share: JSON out, and the rule for names that come in."""

import re
from typing import Annotated, Any

import msgspec
from fastapi import Path, Query
from fastapi.responses import Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from shared.contracts.state import NAME_PATTERN
from shared.policy.limits import MAX_BYTES

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
Bytes = Annotated[int, Field(strict=True, ge=0, le=MAX_BYTES)]
Text = Annotated[str, Field(max_length=1024)]
TextInPath = Annotated[str, Path(max_length=128)]
TextInQuery = Annotated[str, Query(max_length=1024)]
Version = Annotated[int, Field(strict=True, ge=0, le=2**31)]
VersionInQuery = Annotated[int, Query(ge=0, le=2**31)]
Wait = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]


def answer(result: Any, status: int = 200) -> Response:
    return Response(_encode(result), status, media_type="application/json")
