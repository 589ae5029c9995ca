"""vLLM's OpenAI application in this process: its arguments, the paths of it that are ours, and adapters' own chat templates in it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from services.worker.chat_templates import OwnTemplate, TemplateError
from services.worker.engine import AsgiApp, Receive, Scope, Send
from services.worker.vllm_setup import VllmModules, VllmSettings, engine_names
from shared.errors import StartFailed

_GENERATE_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/tokenize")
_ENGINE_PATHS = {"/v1/tokenize": "/tokenize"}  # where vLLM's path differs from ours
_NOT_VARIABLES = frozenset({"chat_template", "tokenize", "return_dict", "documents"})


def application_arguments(vllm: VllmModules, settings: VllmSettings, folder: Path, public_name: str) -> Any:
    """vLLM's server arguments, with those of `engine_args` that are not the engine's. `public_name` is the base's model name.

    :raises StartFailed: an argument that neither the engine nor the server has.
    """
    parser = vllm.make_arg_parser(vllm.argument_parser())
    args = parser.parse_args(["--model", str(folder), "--served-model-name", public_name, "--enable-lora"])
    args.disable_log_stats = True
    args.disable_fastapi_docs = True
    args.enable_log_requests = False
    args.enable_prompt_tokens_details = True
    for name, value in settings.engine_args.items():
        if hasattr(args, name):
            setattr(args, name, value)
        elif name not in engine_names(vllm):
            raise StartFailed(f"engine_args has `{name}`, which vLLM {vllm.version} does not know", where="engine_args")
    return args


async def build_application(vllm: VllmModules, client: Any, args: Any, tasks: tuple[str, ...]) -> Any:
    """vLLM's FastAPI application over `client`, without a socket."""
    app = vllm.build_app(args, tasks)
    await vllm.init_app_state(client, app.state, args, supported_tasks=tasks)
    return app


def endpoints(tasks: tuple[str, ...]) -> tuple[str, ...]:
    """The OpenAI paths that an engine with these tasks serves."""
    served = _GENERATE_PATHS if "generate" in tasks else ()
    return (*served, "/v1/embeddings") if "embed" in tasks else served


def only(paths: tuple[str, ...], app: AsgiApp) -> AsgiApp:
    """`app` under our paths; the rest of what vLLM's server offers is not found."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path in paths:
            inner = _ENGINE_PATHS.get(path, path)
            await app({**scope, "path": inner, "raw_path": inner.encode()}, receive, send)
            return
        body = msgspec.json.encode({"error": {"message": f"{path} is not served by this engine", "code": "endpoint_not_supported"}})
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})

    return call


def use_templates(renderer: Any, template_of_current: Callable[[], OwnTemplate | None]) -> None:
    """Lets a chat request be rendered with the template that belongs to its adapter, on every endpoint and for nobody else."""
    render, render_async, apply_async = renderer.render_messages, renderer.render_messages_async, renderer._apply_chat_template_async

    def render_messages(messages: Any, params: Any) -> Any:
        if template_of_current() is not None:
            raise TemplateError("this endpoint cannot render a conversation with the adapter's own chat template")
        return render(messages, params)

    async def render_messages_async(messages: Any, params: Any) -> Any:
        own = template_of_current()
        return await render_async(messages, params if own is None else dataclasses.replace(params, chat_template=own.source))

    async def apply_chat_template_async(model_config: Any, tokenizer: Any, conversation: Any, **variables: Any) -> Any:
        own = template_of_current()
        if own is None:
            return await apply_async(model_config, tokenizer, conversation, **variables)
        tools = variables.pop("tools", None)
        if variables.pop("continue_final_message", False):
            raise TemplateError("continue_final_message does not go with an adapter's own chat template")
        given = {name: value for name, value in variables.items() if name not in _NOT_VARIABLES}
        return await own.render(conversation, tools, {**tokenizer.special_tokens_map, **given})

    renderer.render_messages = render_messages
    renderer.render_messages_async = render_messages_async
    renderer._apply_chat_template_async = apply_chat_template_async
