"""`tenantry up`: everything on this machine in one command; this is the command itself, its options and exit codes."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from services.cli.manifest import read
from services.cli.up_options import DEMO, DEMO_LABEL, UpOptions, prepare
from services.cli.up_session import UpSession
from shared import log as logging
from shared.errors import ConfigInvalid, TenantryError


def up(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The router's, on 127.0.0.1.")] = 8080,
    data: Annotated[Path, typer.Option("--data", envvar="TENANTRY_DATA", help="State, keys and logs; kept between runs.")] = Path(
        ".tenantry"
    ),
    model: Annotated[str, typer.Option("--model", help="Model folder or hub id; default: the bundled demo base.")] = "",
    label: Annotated[
        str, typer.Option("--label", help="What adapters name as their base (label or label@revision); default: the hub id.")
    ] = "",
    max_loras: Annotated[int, typer.Option("--max-loras", min=1, help="Slots for adapters.")] = 8,
    max_lora_rank: Annotated[int, typer.Option("--max-lora-rank", min=1, help="1, 8, 16, 32, 64, ...")] = 16,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, float16, bfloat16; default: float32 for the demo, else bfloat16.")] = "",
    engine_arg: Annotated[str, typer.Option("--engine-arg", metavar="JSON", help="Further vLLM arguments as one JSON object.")] = "{}",
    config: Annotated[Path | None, typer.Option("--config", help="The YAML file to apply; default: the demo's.")] = None,
    demo: Annotated[bool, typer.Option("--demo/--no-demo", help="Apply the demo's file where no --config and no --model is given.")] = True,
    nats_port: Annotated[int, typer.Option("--nats-port", help="Default: a free one, the same at the next start.")] = 0,
    engine: Annotated[str, typer.Option("--engine", hidden=True)] = "vllm",
) -> None:
    """Start NATS, registry, one worker and the router here, apply a file, and say how to use it."""
    try:
        engine_args = _engine_args(engine_arg)
    except ConfigInvalid as error:
        _fail(error)
        raise SystemExit(2) from error
    if config is None and demo and not model:
        config = DEMO / "tenantry.yaml"
    options = UpOptions(
        port=port,
        data=data.absolute(),
        model=model or str(DEMO / "base"),
        label=label or (DEMO_LABEL if not model else model if not Path(model).exists() else ""),
        engine=engine,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        dtype=dtype or ("bfloat16" if model else "float32"),
        engine_args=engine_args,
        config=config,
        nats_port=nats_port,
    )
    raise SystemExit(run(options))


def run(options: UpOptions) -> int:
    """The exit code: 0 after a clean stop, 2 when it could not start, 1 when it failed later."""
    try:
        manifest = read(options.config) if options.config is not None else None
        folder = prepare(options)
    except TenantryError as error:
        _fail(error)
        return 2
    logging.configure("up", {"TENANTRY_LOG_LEVEL": "error"} | dict(os.environ))
    session = UpSession(options, folder, manifest)
    try:
        asyncio.run(session.main())
    except BaseExceptionGroup as group:
        ours, others = group.split(TenantryError)
        if ours is None or others is not None:
            raise
        _fail(_first(ours))
        return 1 if session.served else 2
    return 0


def _engine_args(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigInvalid(
            f"--engine-arg must be a JSON object such as '{{\"max_model_len\": 2048}}': {error}", where="--engine-arg"
        ) from error


def _first(group: BaseExceptionGroup[TenantryError]) -> TenantryError:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, TenantryError)
    return found


def _fail(error: TenantryError) -> None:
    sys.stderr.write(f"tenantry up: {error.message}\n")
