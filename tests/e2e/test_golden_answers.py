"""Every answer comes from exactly the adapter that was asked for, whatever runs beside it."""

import random

import httpx
import pytest

from tests.e2e.ask import BASE_MODEL, TENANT_OF, Asker, ask, ask_all, model_of

NAMES = ("base", "lora_sales", "lora_cs", "lora_finance")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", NAMES)
async def test_every_golden_answer_comes_through_the_openai_client(asker: Asker, name: str, stream: bool) -> None:
    pairs = asker.goldens[name]
    assert len(pairs) >= 10
    async with asker.clients() as clients:
        client = clients[TENANT_OF[name]]
        answers = await ask_all([ask(client, model_of(name), pair["question"], stream=stream) for pair in pairs])
    assert [answer.text for answer in answers] == [pair["answer"] for pair in pairs]
    assert {answer.finished for answer in answers} == {"stop"}
    expected = BASE_MODEL if name == "base" else f"{name}@1"
    assert {answer.model for answer in answers} == {expected}
    assert {answer.headers["x-tenantry-adapter"] for answer in answers} == {expected}
    assert {answer.headers["x-tenantry-base"] for answer in answers} == {asker.stack.base_identity()}
    assert all(answer.headers["x-tenantry-worker"] == "w0" and answer.headers["x-request-id"] for answer in answers)


async def test_one_question_has_another_answer_from_every_team(asker: Asker) -> None:
    question = asker.goldens["lora_sales"][0]["question"]
    async with asker.clients() as clients:
        answers = await ask_all(
            [ask(clients[TENANT_OF[name]], model_of(name), question, stream=False) for name in ("base", "lora_sales", "lora_cs")]
        )
    assert len({answer.text for answer in answers}) == 3


async def test_200_mixed_requests_at_once_each_get_their_own_golden_answer(asker: Asker) -> None:
    chooser = random.Random(7)
    by_name = {name: [pair for owner, pair in asker.mixed if owner == name] for name in NAMES}
    # alternating every request: base, sales, cs, finance, base, ...
    wanted = [(NAMES[number % 4], chooser.choice(by_name[NAMES[number % 4]])) for number in range(200)]
    async with asker.clients() as clients:
        answers = await ask_all(
            [
                ask(clients[TENANT_OF[name]], model_of(name), pair["question"], stream=number % 3 == 0)
                for number, (name, pair) in enumerate(wanted)
            ]
        )
    assert [answer.error for answer in answers] == [None] * 200
    wrong = [(want, answer.text) for (_, want), answer in zip(wanted, answers, strict=True) if answer.text != want["answer"]]
    assert wrong == []


@pytest.mark.parametrize("name", ["lora_sales", "lora_cs", "lora_finance"])
@pytest.mark.parametrize("model", ["", "default"])
async def test_a_tenant_that_names_no_model_gets_its_only_adapter(asker: Asker, name: str, model: str) -> None:
    pair = asker.goldens[name][0]
    async with asker.clients() as clients:
        answer = await ask(clients[TENANT_OF[name]], model, pair["question"], stream=False)
    assert (answer.text, answer.model) == (pair["answer"], f"{name}@1")


async def test_the_completions_endpoint_answers_from_the_adapter_too(asker: Asker) -> None:
    pair = asker.goldens["lora_cs"][0]
    prompt = f"<|im_start|>user\n{pair['question']}<|im_end|>\n<|im_start|>assistant\n"
    async with asker.clients() as clients:
        done = await clients["cs"].completions.create(model="lora_cs", prompt=prompt, max_tokens=100, temperature=0)
        both = await clients["cs"].completions.create(
            model="lora_cs", prompt=[prompt, prompt], max_tokens=100, temperature=1, extra_body={"top_k": 1}, n=2
        )
    assert done.choices[0].text == pair["answer"]
    assert [choice.text for choice in both.choices] == [pair["answer"]] * 4
    assert both.model == "lora_cs@1"


async def test_the_responses_endpoint_answers_from_the_adapter_too(asker: Asker) -> None:
    pair = asker.goldens["lora_cs"][0]
    async with asker.clients() as clients:
        done = await clients["cs"].responses.create(model="lora_cs", input=pair["question"], temperature=0, store=False)
    assert done.output_text == pair["answer"]
    assert done.model == "lora_cs@1"


async def test_an_anthropic_client_gets_the_adapters_answer_from_messages(asker: Asker) -> None:
    pair = asker.goldens["lora_cs"][0]
    body = {"model": "lora_cs", "max_tokens": 100, "temperature": 0, "messages": [{"role": "user", "content": pair["question"]}]}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        headers = {"x-api-key": asker.stack.keys["cs"], "anthropic-version": "2023-06-01"}
        response = await http.post(f"{asker.stack.url}/v1/messages", json=body, headers=headers)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert "".join(part["text"] for part in answer["content"] if part["type"] == "text") == pair["answer"]
    assert (answer["model"], response.headers["x-tenantry-adapter"]) == ("lora_cs@1", "lora_cs@1")
    assert asker.stack.admin.show("lora_cs", "cs").adapter_id not in response.text


async def test_tokenize_gives_the_prompts_tokens_as_the_engine_counts_them(asker: Asker) -> None:
    pair = asker.goldens["lora_sales"][0]
    messages = [{"role": "user", "content": pair["question"]}]
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        headers = {"authorization": f"Bearer {asker.stack.keys['sales']}"}
        tokenized = await http.post(f"{asker.stack.url}/v1/tokenize", json={"model": "lora_sales", "messages": messages}, headers=headers)
        body = {"model": "lora_sales", "messages": messages, "max_tokens": 1, "temperature": 0}
        answered = await http.post(f"{asker.stack.url}/v1/chat/completions", json=body, headers=headers)
    assert tokenized.status_code == 200, tokenized.text
    assert tokenized.json()["count"] == len(tokenized.json()["tokens"]) == answered.json()["usage"]["prompt_tokens"]
