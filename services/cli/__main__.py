"""The command `tenantry`. Exit codes: 0 done, 1 refused or failed (one line says why), 2 used wrongly or could not start."""

import sys

import typer

from services.cli import adapters, canary, matrix, tenants, usage
from services.cli.apply_command import apply_file
from services.cli.ask import ask
from services.cli.audit import audit
from services.cli.nats_config import nats_config
from services.cli.output import print_error
from services.cli.statement import statement
from services.cli.top import top
from services.cli.up import up
from shared.errors import TenantryError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Many tenants' LoRA adapters on one shared base model.",
)
app.command("up")(up)
app.command("apply")(apply_file)
app.command("ask")(ask)
app.command("top")(top)
app.command("audit")(audit)
app.command("statement")(statement)
app.command("nats-config")(nats_config)
app.add_typer(tenants.app, name="tenant")
app.add_typer(adapters.app, name="adapter")
app.add_typer(canary.app, name="canary")
app.add_typer(matrix.app, name="matrix")
app.add_typer(usage.app, name="usage")


def main() -> None:
    try:
        app()
    except TenantryError as error:
        print_error(error, as_json="--json" in sys.argv[1:])
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
