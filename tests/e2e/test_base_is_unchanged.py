"""Adapters coming and going change nothing for the base: tokens and log-probabilities bit for bit."""

from typing import Any

import httpx

from tests.e2e.ask import BASE_MODEL, TENANT_OF, Asker, ask, ask_all, model_of
from tests.e2e.stack import DEMO, Stack


async def logprobs(stack: Stack, question: str) -> list[tuple[str, float]]:
    body: dict[str, Any] = {
        "model": BASE_MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 3,
    }
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        response = await http.post(
            f"{stack.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {stack.keys['sales']}"}
        )
    assert response.status_code == 200, response.text
    content = response.json()["choices"][0]["logprobs"]["content"]
    return [(top["token"], top["logprob"]) for position in content for top in position["top_logprobs"]]


async def test_base_answers_are_bit_identical_before_with_and_after_more_adapters(stack: Stack, asker: Asker) -> None:
    questions = [pair["question"] for pair in asker.goldens["base"][:4]]
    before = [await logprobs(stack, question) for question in questions]
    stack.admin.upload("sales", "second", DEMO / "adapters" / "lora_cs")
    try:
        mounted = [await logprobs(stack, question) for question in questions]
    finally:
        stack.admin.unload("second", "sales", wait=True)
    after = [await logprobs(stack, question) for question in questions]
    assert mounted == before
    assert after == before
    assert all(len(found) >= 3 for found in before)


async def test_base_tokens_are_equal_alone_and_in_company(stack: Stack, asker: Asker) -> None:
    wanted = asker.goldens["base"]
    async with asker.clients() as clients:
        crowd = [
            ask(clients[TENANT_OF[name]], model_of(name), pair["question"], stream=False) for name, pair in asker.mixed for _ in range(2)
        ]
        answers = await ask_all(crowd)
    names = [name for name, _ in asker.mixed for _ in range(2)]
    from_base = [answer.text for name, answer in zip(names, answers, strict=True) if name == "base"]
    assert from_base == [pair["answer"] for pair in wanted for _ in range(2)]
