"""The admin plane over HTTP: one request, one typed answer, refusals as ClientError; and archives sent piece by piece."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from services.cli.archive import pack
from shared.errors import TenantryError

T = TypeVar("T")
Progress = Callable[[int, int], None]  # bytes sent, bytes in all

_PIECE_BYTES = 256 * 1024


class ClientError(TenantryError):
    """The service refused, or could not be reached (status 0). `peer_code` is the service's own stable code."""

    code = "client_error"

    def __init__(self, message: str, *, status: int = 0, peer_code: str = "", **fields: Any) -> None:
        super().__init__(message, **fields)
        self.status = status
        self.peer_code = peer_code


class AdminHttp:
    """Safe for one thread. Every method raises ClientError; results are the contracts' views."""

    def __init__(self, url: str, admin_key: str, *, timeout_s: float = 30.0, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=f"{self.url}/admin/v1",
            headers={"authorization": f"Bearer {admin_key}"},
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            transport=transport,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _get(self, path: str, kind: type[T], **params: Any) -> T:
        return self._send("GET", path, kind, params=present(**params))

    def _send(self, method: str, path: str, kind: type[T], **options: Any) -> T:
        try:
            response = self._http.request(method, path, **options)
        except httpx.ConnectError as error:
            raise ClientError(f"nothing answers at {self.url}: is `tenantry up` running? ({error})", peer_code="unreachable") from error
        except httpx.TimeoutException as error:
            raise ClientError(f"{self.url} did not answer in time ({method} {path})", peer_code="timeout") from error
        except httpx.HTTPError as error:
            raise ClientError(f"the connection to {self.url} broke ({error or type(error).__name__})", peer_code="unreachable") from error
        if response.status_code >= 400:
            raise _refusal(response)
        if not response.content:
            return msgspec.convert(None, kind)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.DecodeError as error:
            raise ClientError(f"{self.url}{path} answered what this client cannot read: {error}", status=response.status_code) from error

    def _send_archive(self, url: str, path: Path, params: dict[str, Any], wait_s: float, kind: type[T], progress: Progress | None) -> T:
        """Sends a folder or an archive (.tar, .tar.gz, .zip).

        :raises ConfigInvalid: `path` is no adapter.
        """
        with tempfile.TemporaryDirectory(prefix="tenantry-") as scratch:
            archive = path
            if path.is_dir():
                archive = Path(scratch) / "adapter.tar"
                pack(path, archive)
            size = archive.stat().st_size
            if not size:
                raise ClientError(
                    f"{path} is an empty file, not an adapter's archive", status=400, peer_code="adapter_rejected", reason="empty"
                )
            return self._send(
                "POST",
                url,
                kind,
                params=params,
                content=_pieces(archive, size, progress),
                headers={"content-type": "application/octet-stream", "content-length": str(size)},
                timeout=httpx.Timeout(wait_s + 60.0, connect=5.0),
            )


def _refusal(response: httpx.Response) -> ClientError:
    try:
        error: dict[str, Any] = msgspec.json.decode(response.content)["error"]
        message, peer_code = str(error["message"]), str(error.get("code") or "")
    except (msgspec.DecodeError, KeyError, TypeError):
        return ClientError(f"HTTP {response.status_code} without a reason", status=response.status_code)
    fields = {name: value for name, value in error.items() if name not in {"message", "code", "type", "status", "peer_code"}}
    return ClientError(message, status=response.status_code, peer_code=peer_code, **fields)


def present(**params: Any) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value != ""}


def _pieces(archive: Path, size: int, progress: Progress | None) -> Iterator[bytes]:
    sent = 0
    with archive.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
            sent += len(piece)
            if progress is not None:
                progress(sent, size)
