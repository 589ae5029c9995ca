"""Adapters' own chat templates in processes of their own, with real processes."""

import asyncio

import psutil
import pytest

from services.worker import chat_templates
from services.worker.chat_templates import ChatTemplates, OwnTemplate, TemplateError
from shared.errors import LoadFailed

CHAT = [{"role": "user", "content": "hello"}]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def a_short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "RENDER_LIMIT_S", 1)


async def rendered(source: str, **variables: object) -> str:
    own = OwnTemplate(source)
    try:
        return await own.render(CHAT, variables.pop("tools", None), variables)  # type: ignore[arg-type]
    finally:
        await own.close()


async def test_a_template_sees_messages_tools_and_variables_as_hugging_faces_do() -> None:
    assert await rendered(CHATML, add_generation_prompt=True) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    tools = [{"type": "function", "function": {"name": "f<g>"}}]
    assert await rendered("{{ tools | tojson }}", tools=tools) == '[{"type": "function", "function": {"name": "f<g>"}}]'
    assert await rendered("{{ bos_token }}{% if enable_thinking %}t{% endif %}", bos_token="<s>", enable_thinking=True) == "<s>t"
    assert await rendered("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}") == "hello"


async def test_a_template_that_raises_says_so_and_goes_on() -> None:
    own = OwnTemplate("{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}ok")
    try:
        with pytest.raises(TemplateError, match="one message only"):
            await own.render(CHAT * 2, None, {})
        assert await own.render(CHAT, None, {}) == "ok"
    finally:
        await own.close()


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}",
    "counts in C": "{{ 9 ** (9 ** (messages|length + 8)) }}",
    "eats memory": "{{ ('x' * 10 ** 10) | length }}",
    "writes without end": "{% for a in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "reaches out": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "recurses": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_template_hurts_only_its_own_process_and_its_adapter_is_refused(source: str) -> None:
    templates = ChatTemplates()
    async with asyncio.timeout(20):
        with pytest.raises(LoadFailed) as failed:
            await templates.add("ad_1", source)
    assert failed.value.fields["reason"] == "bad_chat_template"
    assert templates.find("ad_1") is None


@pytest.mark.parametrize("source", ["{% if %}", "{{", "x" * 70_000])
async def test_a_template_that_is_none_is_refused(source: str) -> None:
    with pytest.raises(LoadFailed):
        await ChatTemplates().add("ad_1", source)


async def test_a_template_that_is_hostile_only_sometimes_is_ended_and_serves_the_next_conversation() -> None:
    templates = ChatTemplates()
    await templates.add("ad_1", "{% if messages|length > 1 %}" + HOSTILE["loops"] + "{% endif %}ok")
    own = templates.find("ad_1")
    assert own is not None
    with pytest.raises(TemplateError, match="took more than 1 s"):
        await own.render(CHAT * 2, None, {})
    assert await own.render(CHAT, None, {}) == "ok"
    await templates.remove("ad_1")
    assert templates.find("ad_1") is None


async def test_no_process_is_left_after_a_close_and_a_cancelled_conversation_leaves_the_template_usable() -> None:
    templates = ChatTemplates()
    await templates.add("ad_1", "{% if messages|length > 1 %}" + HOSTILE["loops"] + "{% endif %}ok")
    own = templates.find("ad_1")
    assert own is not None
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(own.render(CHAT * 2, None, {}))
        for _ in range(20):
            await asyncio.sleep(0)
        asking.cancel()
    assert await own.render(CHAT, None, {}) == "ok"
    child = psutil.Process(own._process.pid)  # type: ignore[union-attr]
    assert child.environ() == {}
    await templates.close()
    assert not child.is_running()
