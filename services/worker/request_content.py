"""Media and tools inside a request's messages: what would make the worker fetch, load or share something is refused by its path."""

from typing import Any, NoReturn, cast

from shared.errors import FieldNotAllowed

_NEVER = frozenset(
    {
        "uuid",  # names an entry of the engine's media cache, which tenants share
        "file",
        "file_id",
        "image_pil",
        "image_embeds",
        "audio_embeds",
        "video_embeds",
        "prompt_embeds",
        "server_url",
        "connector_id",
    }
)
_CLIENT_TOOLS = frozenset({"function", "custom"})
_NESTED = ("content", "output")


def check_content(fields: dict[str, Any]) -> None:
    """Checks messages, input, system and tools of a parsed body.

    A tool call's arguments are the caller's own data and may hold any URL.

    :raises FieldNotAllowed: a URL that is not a data URL, a reference to stored media, or a tool that the server would run.
    """
    for name in ("messages", "input", "system"):
        _check_parts(fields.get(name), name)
    tools = fields.get("tools")
    if isinstance(tools, list):
        for index, tool in enumerate(cast("list[Any]", tools)):
            kind = cast("dict[str, Any]", tool).get("type", "function") if isinstance(tool, dict) else "function"
            if kind is not None and kind not in _CLIENT_TOOLS:
                raise FieldNotAllowed(
                    f"tools[{index}] has type {kind!r}: the caller runs its tools, only functions are passed on",
                    field=f"tools[{index}].type",
                )


def _check_parts(value: Any, path: str) -> None:
    """A list of messages or content parts, or one of them. Recursion is as deep as the body, which is bounded."""
    if isinstance(value, list):
        for index, item in enumerate(cast("list[Any]", value)):
            if isinstance(item, dict | list):
                _check_parts(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        part = cast("dict[str, Any]", value)
        for key, item in part.items():
            where = f"{path}.{key}"
            if item is None:
                continue
            if key in _NEVER:
                _refuse(where, "refers to something kept outside the request")
            if key == "url" or key.endswith("_url"):
                _check_url(item, where)
            elif key == "source":
                _check_source(item, where)
            elif key in _NESTED:
                _check_parts(item, where)


def _check_url(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, item in cast("dict[str, Any]", value).items():
            if key in _NEVER:
                _refuse(f"{path}.{key}", "refers to something kept outside the request")
            if key == "url":
                _check_url(item, f"{path}.url")
    elif not isinstance(value, str) or not value.startswith("data:"):
        _refuse(path, "the worker fetches no addresses; send a data: URL")


def _check_source(value: Any, path: str) -> None:
    """Anthropic's image and document blocks: {"type": "base64" | "text" | "content" | "url" | "file", ...}."""
    if not isinstance(value, dict):
        return
    source = cast("dict[str, Any]", value)
    _check_parts(source, path)
    if source.get("type") == "file":
        _refuse(path, "refers to something kept outside the request")


def _refuse(path: str, why: str) -> NoReturn:
    raise FieldNotAllowed(f"`{path}` {why}" if why.startswith("refers") else f"`{path}` is not allowed: {why}", field=path)
