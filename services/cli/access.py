"""Where a command finds the router and its credential: options, then the environment, then the data folder of `tenantry up`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from services.cli.client import Client
from services.cli.datafolder import DataFolder
from shared.errors import ConfigInvalid

DEFAULT_URL = "http://127.0.0.1:8080"

DataOption = Annotated[Path, typer.Option("--data", envvar="TENANTRY_DATA", help="Data folder of `tenantry up`.", show_default=True)]
UrlOption = Annotated[str, typer.Option("--url", envvar="TENANTRY_URL", help="The router; default: the one `tenantry up` started.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]

DATA = Path(".tenantry")


def router_url(url: str, data: Path) -> str:
    if url:
        return url
    running = DataFolder(data).running()
    return running.url if running is not None else DEFAULT_URL


def client(url: str, data: Path) -> Client:
    """:raises ConfigInvalid: there is no admin key to be found."""
    key = os.environ.get("TENANTRY_ADMIN_KEY", "") or DataFolder(data).admin_key()
    if not key:
        raise ConfigInvalid(
            f"no admin key: set TENANTRY_ADMIN_KEY, or run where `tenantry up` keeps its data (looked in {data}; --data names another)",
            where="TENANTRY_ADMIN_KEY",
        )
    return Client(router_url(url, data), key)


def api_key(tenant: str, data: Path) -> str:
    """:raises ConfigInvalid: no API key for this tenant is kept here."""
    key = os.environ.get("TENANTRY_API_KEY", "")
    if key:
        return key
    kept = DataFolder(data).api_keys()
    if tenant not in kept:
        known = ", ".join(sorted(name for name in kept if name != "*")) or "none"
        raise ConfigInvalid(
            f"no API key for tenant {tenant} in {data} (there are: {known}): set TENANTRY_API_KEY, or make one with "
            f"`tenantry tenant key {tenant} --save`",
            where="TENANTRY_API_KEY",
        )
    return kept[tenant].secret
