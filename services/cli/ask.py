"""`tenantry ask`: one question to a tenant's adapter through the public API, the answer as it comes."""

from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import msgspec
import typer

from services.cli import access
from services.cli.client import ClientError
from services.cli.output import console, print_json, short_digest


def ask(
    tenant: Annotated[str, typer.Argument(help="The tenant whose API key is used.")],
    question: Annotated[str, typer.Argument()],
    adapter: Annotated[str, typer.Option("--adapter", "--model", help="Default: the tenant's default adapter.")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0)] = 0.0,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Ask one question and show the answer as it is made."""
    base_url = access.router_url(url, data)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": not as_json,
    }
    if adapter:
        body["model"] = adapter
    headers = {"authorization": f"Bearer {access.api_key(tenant, data)}", "content-type": "application/json"}
    with httpx.Client(timeout=httpx.Timeout(330.0, connect=5.0), trust_env=False) as http:
        try:
            with http.stream("POST", f"{base_url}/v1/chat/completions", content=msgspec.json.encode(body), headers=headers) as response:
                if response.status_code >= 400:
                    response.read()
                    raise _refused(response.status_code, response.content)
                if as_json:
                    served = {name: value for name, value in response.headers.items() if name.startswith("x-tenantry-")}
                    print_json({"served_by": served, "answer": msgspec.json.decode(response.read())})
                    return
                _show(response)
        except httpx.ConnectError as error:
            raise ClientError(f"nothing answers at {base_url}: is `tenantry up` running?", peer_code="unreachable") from error
        except httpx.HTTPError as error:
            raise ClientError(f"the answer broke off ({error or type(error).__name__})", peer_code="broken_stream") from error


def _show(response: httpx.Response) -> None:
    said = False
    for piece in text_pieces(response.iter_lines()):
        said = said or bool(piece)
        console.print(piece, end="", markup=False, soft_wrap=True)
    console.print()
    if not said:
        raise ClientError("the answer was empty", peer_code="empty_answer")
    adapter = response.headers.get("x-tenantry-adapter", "")
    digest = response.headers.get("x-tenantry-digest", "")
    base = response.headers.get("x-tenantry-base", "")
    label, _, identity = base.rpartition("@")
    served = f"{label}@{identity[:12]}"
    if adapter:
        served = f"{adapter} ({short_digest(digest)}) on {served}"
    console.print(served, style="dim", markup=False)


def text_pieces(lines: Iterator[str]) -> Iterator[str]:
    """The answer's text from the lines of a server-sent stream of chat chunks.

    :raises ClientError: the stream carries an error, or ends without `[DONE]`.
    """
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        chunk: dict[str, Any] = msgspec.json.decode(data)
        if "error" in chunk:
            raise _refused(200, data.encode())
        for choice in chunk.get("choices", []):
            yield choice.get("delta", {}).get("content") or ""
    raise ClientError("the answer broke off before its end", peer_code="broken_stream")


def _refused(status: int, content: bytes) -> ClientError:
    try:
        error = msgspec.json.decode(content)["error"]
        return ClientError(str(error["message"]), status=status, peer_code=str(error.get("code") or ""))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return ClientError(f"HTTP {status} without a reason", status=status)
