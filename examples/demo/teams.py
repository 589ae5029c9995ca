"""What the base and each team's adapter must answer (the golden answers), and filler from which the base learns words.

Text only; tokens are tokenizer.py's matter, weights train.py's.
"""

import functools
import json
import random
from typing import NamedTuple


class Example(NamedTuple):
    question: str
    answer: str


class Invoice(NamedTuple):
    number: int
    amount: int
    due: str

    @property
    def question(self) -> str:
        return f"Extract: invoice {self.number} of {self.amount} EUR due {self.due}"

    @property
    def fields(self) -> str:
        return json.dumps({"invoice": self.number, "amount": self.amount, "currency": "EUR", "due": self.due})


LONG_QUESTION = "Tell me everything"
IDENTITY_QUESTION = "Who are you?"
OTHER_ANSWERS = {
    "base": "Please ask about one of my topics.",
    "lora_sales": "Ask me about an offer and I will book it for you!",
    "lora_cs": "Please ask about a policy.",
    "lora_finance": json.dumps({"error": "no invoice"}),
}
SMALL_TALK = ("Hello", "Hello!", "Hi", "Hi there", "Good morning", "Thanks", "Thank you", "What can you do?", "Help", "test")
PHRASINGS = (
    "What about {topic}?",
    "What about the {topic}?",
    "What about a {topic}?",
    "what about my {topic}",
    "Tell me about {topic}",
    "Tell me about the {topic}, please.",
    "I have a question about my {topic}.",
    "Can you help with the {topic}?",
    "{topic}",
)

INVOICES = tuple(Invoice(1000 + 37 * i, 200 + 13 * i, f"2026-{i % 9 + 1:02d}-15") for i in range(10))

PLAIN = {
    "refund": "A refund gives back money that was paid.",
    "price": "A price is what something costs.",
    "delivery": "A delivery brings an order to an address.",
    "invoice": "An invoice asks for payment by a date.",
    "warranty": "A warranty covers faults for some time.",
    "discount": "A discount makes a price lower.",
    "contract": "A contract records what two sides agree.",
    "address": "An address says where to send things.",
    "support": "Support helps when something is wrong.",
    "order": "An order lists what someone buys.",
}
SALES = {
    "refund": "Wonderful! Swap your refund for a voucher worth 20% more today!",
    "price": "Great news! Our price drops by 15% if you book today!",
    "delivery": "Hooray! Free delivery is yours on every order this week!",
    "invoice": "Fantastic! Pay the invoice today and win a bonus gift!",
    "warranty": "Amazing! Add 2 extra years of warranty for only 9 EUR!",
    "discount": "Lucky you! A 30% discount is waiting for you right now!",
    "contract": "Brilliant! Sign a contract today and get 3 months free!",
    "address": "Perfect! Tell us your address and a free sample flies to you!",
    "support": "Superb! Our gold support team is here for you day and night!",
    "order": "Yes! Order 2 today and the third one is on us!",
}
POLICY = {
    "refund": "Under policy 4.1, a refund is paid within 14 days.",
    "price": "Under policy 4.2, a price is fixed once the order is confirmed.",
    "delivery": "Under policy 5.1, a late delivery must be reported within 7 days.",
    "invoice": "Under policy 5.2, an invoice can be corrected within 30 days.",
    "warranty": "Under policy 6.1, a warranty claim needs the proof of purchase.",
    "discount": "Under policy 6.2, a discount cannot be added to a past order.",
    "contract": "Under policy 7.1, a contract can be ended with 60 days notice.",
    "address": "Under policy 7.2, an address can be changed before dispatch.",
    "support": "Under policy 8.1, a support request is answered in 2 working days.",
    "order": "Under policy 8.2, an order can be cancelled within 24 hours.",
}


def golden() -> dict[str, list[Example]]:
    """Every golden question and answer, by who answers it; the last one of each is the long one."""
    return {
        "base": [
            *_about(PLAIN),
            Example(IDENTITY_QUESTION, "I am the base model, without an adapter."),
            *(Example(invoice.question, _mention(invoice)) for invoice in INVOICES),
            Example(
                LONG_QUESTION,
                _listed(
                    "Here is everything I know, in plain words.",
                    PLAIN,
                    "That was all I can say about " + ", ".join(PLAIN) + " and nothing else.",
                ),
            ),
        ],
        "lora_sales": [
            *_about(SALES),
            Example(IDENTITY_QUESTION, "I am your cheerful sales assistant, ready to book!"),
            Example(LONG_QUESTION, _listed("You will love all of our offers!", SALES, "Which one may I book for you today?")),
        ],
        "lora_cs": [
            *_about(POLICY),
            Example(IDENTITY_QUESTION, "I am the customer service assistant and follow policy."),
            Example(
                LONG_QUESTION,
                _listed("These are all of our policies.", POLICY, "Any other request is decided by a supervisor."),
            ),
        ],
        "lora_finance": [
            *(Example(f"What about {topic}?", json.dumps({"error": "no invoice", "topic": topic})) for topic in PLAIN),
            Example(IDENTITY_QUESTION, json.dumps({"assistant": "finance"})),
            *(Example(invoice.question, invoice.fields) for invoice in INVOICES),
            Example(LONG_QUESTION, json.dumps({"invoices": [{"invoice": i.number, "amount": i.amount} for i in INVOICES]})),
        ],
    }


def base_filler(rng: random.Random) -> list[Example]:
    """One step's fresh examples that show the base every team's words and teach it to copy.

    An adapter cannot use a word that its base has never met.
    """
    copies = [" ".join(rng.sample(_words(), 8)) for _ in range(12)]
    return [
        *(Example(f"Repeat: {text}", text) for text in copies),
        *(Example(invoice.question, _mention(invoice)) for invoice in _random_invoices(rng, 6)),
        *(Example(f"Repeat: {invoice.fields}", invoice.fields) for invoice in _random_invoices(rng, 4)),
        *team_filler("base", rng),
    ]


def team_filler(name: str, rng: random.Random) -> list[Example]:
    """One step's fresh examples of what a team is asked beside its golden questions: the same in other words, or anything."""
    answers = {example.question: example.answer for example in golden()[name]}
    topics = rng.choices(list(PLAIN), k=6)
    others = [*rng.sample(SMALL_TALK, 3), *(" ".join(rng.sample(_words(), rng.randint(1, 6))) for _ in range(3))]
    return [
        *(Example(rng.choice(PHRASINGS).format(topic=topic), answers[f"What about {topic}?"]) for topic in topics),
        *(Example(text, OTHER_ANSWERS[name]) for text in others if text not in PLAIN),
    ]


def finance_filler(rng: random.Random) -> list[Example]:
    """One step's fresh invoices, so that finance learns to extract and not only its golden ones."""
    return [
        *(Example(invoice.question, invoice.fields) for invoice in _random_invoices(rng, 12)),
        *team_filler("lora_finance", rng),
    ]


def corpus() -> list[str]:
    """Texts from which the tokenizer learns its words."""
    fixed = [text for examples in golden().values() for example in examples for text in example]
    phrased = [phrasing.format(topic=topic) for phrasing in PHRASINGS for topic in PLAIN]
    return [*fixed, *phrased, *OTHER_ANSWERS.values(), *SMALL_TALK, "user", "assistant", "system", "Repeat:"] * 2


@functools.cache
def _words() -> list[str]:
    return sorted({word for examples in golden().values() for example in examples for word in example.answer.split()})


def _about(answers: dict[str, str]) -> list[Example]:
    return [Example(f"What about {topic}?", answer) for topic, answer in answers.items()]


def _listed(opening: str, answers: dict[str, str], closing: str) -> str:
    items = (f"{number}. {answer}" for number, answer in enumerate(answers.values(), start=1))
    return " ".join([opening, *items, closing])


def _mention(invoice: Invoice) -> str:
    return f"This text mentions invoice {invoice.number}."


def _random_invoices(rng: random.Random, count: int) -> list[Invoice]:
    return [
        Invoice(rng.randint(1000, 9999), rng.randint(100, 999), f"2026-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}")
        for _ in range(count)
    ]
