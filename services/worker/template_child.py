"""The process in which one adapter's own chat template is rendered: it may loop for ever or eat memory, and then only it dies.

Run by its path, without the project on sys.path. Reads JSON lines: first {"template"}, then {"messages", "tools", "variables"};
answers each with {"text"} or {"error"}. Templates see what Hugging Face's chat templates see.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 256 * 1024 * 1024
TEXT_CHARS = 4 * 1024 * 1024


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks what trainers learn from; rendered as if it were not there."""

    tags = {"generation"}  # noqa: RUF012  jinja's interface

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    own: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _now}
    environment.globals.update(own)
    return environment.from_string(source)


def _answer(template: jinja2.Template | None, request: dict[str, Any]) -> tuple[jinja2.Template | None, dict[str, str]]:
    try:
        if "template" in request:
            template = _compiled(request["template"])
            return template, {"text": ""}
        assert template is not None
        text = template.render(messages=request["messages"], tools=request["tools"], documents=None, **request["variables"])
    except Exception as error:  # noqa: BLE001  whatever a tenant's template raises is its answer
        return template, {"error": f"{type(error).__name__}: {error}"[:500]}
    return template, {"text": text} if len(text) <= TEXT_CHARS else {"error": f"it renders more than {TEXT_CHARS} characters"}


def main(limit_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it is doing
    template: jinja2.Template | None = None
    for line in sys.stdin:
        signal.alarm(limit_s)
        template, answer = _answer(template, json.loads(line))
        signal.alarm(0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
