"""What `tenantry up` prints when everything serves: the adapters, and lines that can be pasted as they are."""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from services.cli.apply import Outcome
from services.cli.datafolder import DataFolder, SavedKey
from services.cli.output import MB, console, facts, print_line, short_digest, state_text, table
from shared.contracts.admin import AdapterView, TenantView
from shared.contracts.state import Routing

# the demo's adapters know these by heart
_QUESTIONS = {"lora_finance": "Extract: invoice 1037 of 213 EUR due 2026-02-15"}
_QUESTION = "What about refund?"


def print_ready(
    *,
    url: str,
    nats_url: str,
    folder: DataFolder,
    outcome: Outcome,
    tenants: Sequence[TenantView],
    keys: Mapping[str, SavedKey],
    routing: Routing,
) -> None:
    quotas = {view.name: view for view in tenants}
    console.print()
    console.print(adapters_with_quotas(outcome.adapters, quotas))
    serving = {view.tenant: view for view in outcome.adapters if view.state == "ready"}
    mine = [(view, keys[tenant].secret) for tenant, view in serving.items() if tenant in keys]
    if mine:
        _heading("Ask, with curl")
        for view, key in mine:
            print_line(curl_line(url, key, view.name, _QUESTIONS.get(view.name, _QUESTION)))
        if "*" in keys:
            view, _ = mine[0]
            _heading(f"Ask as a gateway that speaks for every tenant ({routing.header} names it; without it: {routing.default.value})")
            print_line(curl_line(url, keys["*"].secret, "", _QUESTIONS.get(view.name, _QUESTION), f"{routing.header}: {view.tenant}"))
        _heading("Ask, with the openai client")
        print_line("from openai import OpenAI")
        for view, key in mine:
            print_line(openai_line(url, key, view.name, _QUESTIONS.get(view.name, _QUESTION)))
    tenantry = _program()
    _heading("Manage")
    example = mine[0][0].tenant if mine else "TENANT"
    print_line(f'{tenantry} ask {example} "{_QUESTION}"')
    print_line(f"{tenantry} top")
    print_line(f"{tenantry} adapter list      (more: {tenantry} --help)")
    console.print()
    places = [
        ("admin key", _near(folder.admin_key_file)),
        ("API keys", _near(folder.keys_file)),
        ("logs", _near(folder.logs)),
        ("NATS", nats_url),
    ]
    console.print(facts(places))
    console.print()
    console.print("Ready. Ctrl-C drains and stops everything; the state is kept.", style="bold")


def adapters_with_quotas(views: Sequence[AdapterView], tenants: Mapping[str, TenantView]) -> Table:
    rows = [
        (
            view.tenant,
            f"{view.name}@{view.version}",
            state_text(view.state),
            str(view.rank),
            _held(tenants.get(view.tenant)),
            short_digest(view.digest),
        )
        for view in views
    ]
    return table(("tenant", "adapter", "state", "rank", "VRAM held / quota", "digest"), rows, right=("rank", "VRAM held / quota"))


def curl_line(url: str, key: str, model: str, question: str, header: str = "") -> str:
    """One line for a shell."""
    body = ({"model": model} if model else {}) | {"messages": [{"role": "user", "content": question}]}
    more = f" -H '{header}'" if header else ""
    return (
        f"curl -s {url}/v1/chat/completions -H 'Authorization: Bearer {key}'{more} "
        f"-H 'Content-Type: application/json' -d {_quoted(json.dumps(body))}"
    )


def openai_line(url: str, key: str, model: str, question: str) -> str:
    """One line of Python, after `from openai import OpenAI`."""
    messages = json.dumps([{"role": "user", "content": question}])
    return (
        f'print(OpenAI(base_url="{url}/v1", api_key="{key}").chat.completions.create('
        f'model="{model}", messages={messages}).choices[0].message.content)'
    )


def _held(tenant: TenantView | None) -> str:
    if tenant is None:
        return ""
    return f"{tenant.vram_held_bytes / MB:.1f} / {tenant.vram_quota_bytes / MB:.0f} MB"


def _heading(text: str) -> None:
    console.print()
    console.print(text, style="bold", markup=False)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _program() -> str:
    return "tenantry" if shutil.which("tenantry") else _near(Path(sys.argv[0]).absolute())


def _near(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
