"""The stream folded: each record once, in the right quarter of an hour, whatever comes again, late, out of order or never."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.registry.usage_book import UsageBook
from services.registry.usage_tables import COLUMNS, SUMS, amounts_of, get_number
from shared.bus import Stored
from shared.contracts.usage import Usage, encode, router_usage_subject, worker_usage_subject
from shared.policy.usage_rollup import QUARTER_MS, Amounts
from tests.usage_records import DAY_MS, GIB, NOON_MS, Stream, attempt, ended, engine, outcome, residency


@pytest.fixture
def book(tmp_path: Path) -> Iterator[UsageBook]:
    found = UsageBook(tmp_path / "usage.sqlite")
    yield found
    found.close()


def total(book: UsageBook, where: str = "1") -> Amounts:
    row = book.connection.execute(f"SELECT {SUMS} FROM lines JOIN dimensions ON id = dimension WHERE {where}").fetchone()
    return amounts_of(tuple(value or 0 for value in row))


def dump(book: UsageBook) -> list[object]:
    """All that is ever answered from."""
    lines = book.connection.execute(
        f"SELECT quarter, outcome, tenant_id, alias, version, key_id, {', '.join(COLUMNS)} FROM lines JOIN dimensions ON id = dimension"
    ).fetchall()
    return [sorted(lines), sorted(book.connection.execute("SELECT * FROM engines")), sorted(book.connection.execute("SELECT * FROM names"))]


def fold(tmp_path: Path, name: str, messages: list[Stored]) -> UsageBook:
    book = UsageBook(tmp_path / f"{name}.sqlite")
    book.apply(messages)
    return book


def test_an_attempt_counts_at_its_end_with_its_last_figures(book: UsageBook) -> None:
    stream = Stream()
    book.apply([stream.add(attempt(checkpoint=1, final=False)), stream.add(attempt(checkpoint=2, final=False))])
    assert total(book) == Amounts()
    book.apply([stream.add(attempt(checkpoint=3)), stream.add(outcome())])
    assert total(book) == Amounts(
        requests=1,
        request_us=60_000,
        first_bytes=1,
        first_byte_us=25_000,
        delivered_bytes=100,
        attempts=1,
        prompt_tokens=10,
        cached_tokens=3,
        completion_tokens=12,
        queue_us=1500,
        first_tokens=1,
        first_token_us=20_000,
        attempt_us=150_000,
        gpu_us=2100,
        kv_byte_ms=3000,
    )


def test_what_comes_twice_counts_once_and_an_older_checkpoint_changes_nothing(book: UsageBook) -> None:
    stream = Stream()
    for _ in range(3):
        book.apply([stream.add(attempt(checkpoint=2)), stream.add(outcome()), stream.add(attempt(checkpoint=1, final=False))])
    assert (total(book).attempts, total(book).requests, total(book).completion_tokens) == (1, 1, 8)


def test_a_message_that_was_applied_is_passed_over_when_it_comes_again(book: UsageBook) -> None:
    stream = Stream()
    first = [stream.add(residency(NOON_MS, NOON_MS + 1000), at_ms=NOON_MS + 1000), stream.add(outcome("a"))]
    book.apply(first)
    before = dump(book)
    book.apply([*first, stream.add(outcome("b"))])
    assert book.sequence == 3
    assert total(book).requests == 2
    book.apply(first)
    assert book.sequence == 3
    assert before != dump(book)


def test_a_hundred_requests_under_one_label_are_a_hundred_bills(book: UsageBook) -> None:
    stream = Stream()
    for number in range(100):
        stream.add(outcome(f"r{number}", client_label="the-same"))
        stream.add(attempt(f"r{number}"))
    book.apply(stream.messages)
    assert (total(book).requests, total(book).attempts, total(book).completion_tokens) == (100, 100, 400)


def test_attempts_of_a_dead_engine_end_with_their_last_checkpoint_marked_partial(book: UsageBook) -> None:
    stream = Stream()
    book.apply(
        [stream.add(attempt("a", checkpoint=5, final=False)), stream.add(attempt("b", checkpoint=1, final=False, incarnation="01B"))]
    )
    assert [(engine.incarnation, engine.attempts) for engine in book.open_engines()] == [("01A", 1), ("01B", 1)]
    book.apply([stream.add(ended())])
    assert [engine.incarnation for engine in book.open_engines()] == ["01B"]
    assert (total(book).attempts, total(book).partial, total(book).completion_tokens, total(book).gpu_us) == (1, 1, 20, 3500)
    book.apply([stream.add(ended())])
    assert total(book).attempts == 1


@pytest.mark.parametrize("outcome_first", [True, False])
def test_a_partial_attempt_is_billed_at_least_the_tokens_that_were_delivered(book: UsageBook, outcome_first: bool) -> None:
    stream = Stream()
    stream.add(attempt(checkpoint=1, final=False))
    cut = outcome(delivered_events=12, outcome="error:worker_lost")
    for record in (cut, ended()) if outcome_first else (ended(), cut):
        stream.add(record)
    book.apply(stream.messages)
    assert (total(book).completion_tokens, total(book).partial, total(book).requests) == (11, 1, 1)


def test_an_engine_that_was_only_thought_dead_gets_the_difference_and_no_second_attempt(book: UsageBook) -> None:
    stream = Stream()
    stream.add(attempt(checkpoint=2, final=False))
    stream.add(ended())
    stream.add(attempt(checkpoint=3, final=False))
    stream.add(attempt(checkpoint=4), at_ms=NOON_MS + QUARTER_MS)
    book.apply(stream.messages)
    counted = total(book)
    assert (counted.attempts, counted.partial, counted.completion_tokens, counted.gpu_us) == (1, 1, 16, 2800)
    later = total(book, f"quarter = {NOON_MS // QUARTER_MS + 1}")
    assert (later.attempts, later.completion_tokens) == (0, 4)


def test_the_quarter_is_that_of_the_stored_end_and_never_in_a_closed_day(book: UsageBook) -> None:
    stream = Stream()
    stream.add(attempt("a", checkpoint=1, final=False), at_ms=NOON_MS)
    stream.add(attempt("a", checkpoint=2), at_ms=NOON_MS + DAY_MS)
    stream.add(attempt("b"), at_ms=NOON_MS)  # the server's clock was set back
    book.apply(stream.messages)
    day = NOON_MS // DAY_MS
    quarters = [quarter for (quarter,) in book.connection.execute("SELECT quarter FROM lines ORDER BY 1")]
    assert quarters == [(day + 1) * 96, (day + 1) * 96 + 48]


def test_residency_is_split_over_quarters_exactly(book: UsageBook) -> None:
    stream = Stream()
    since = NOON_MS + 100_000
    for until in (since + 1, since + 2_000_000, since + 1_500_000, since + 2_000_001):
        stream.add(residency(since, until), at_ms=NOON_MS + 2_200_000)
    stream.add(residency(since, since + 3_000_000, final=True), at_ms=NOON_MS + 3_200_000)
    stream.add(residency(since, since + 4_000_000), at_ms=NOON_MS + 4_200_000)
    book.apply(stream.messages)
    assert total(book).adapter_byte_ms == GIB * 3_000_000
    assert total(book, f"quarter = {NOON_MS // QUARTER_MS}").adapter_byte_ms == GIB * 800_000
    assert total(book, f"quarter = {NOON_MS // QUARTER_MS + 1}").adapter_byte_ms == GIB * 900_000


def test_an_end_is_the_truth_also_where_a_checkpoint_had_gone_beyond_it(book: UsageBook) -> None:
    stream = Stream()
    since = NOON_MS + QUARTER_MS - 1000
    for record in (residency(since, since + 5000), residency(since, since + 600, final=True), residency(since, since + 9000)):
        stream.add(record, at_ms=NOON_MS + QUARTER_MS + 9000)
    book.apply(stream.messages)
    assert total(book).adapter_byte_ms == GIB * 600
    assert total(book, f"quarter = {NOON_MS // QUARTER_MS}").adapter_byte_ms == GIB * 600


def test_sums_beyond_64_bits_stay_exact(book: UsageBook) -> None:
    stream = Stream()
    huge = (1 << 60) - 1
    for number in range(40):
        stream.add(attempt(f"r{number}", kv_byte_ms=huge))
    book.apply(stream.messages)
    assert total(book).kv_byte_ms == 40 * huge


@pytest.mark.parametrize(
    ("record", "subject"),
    [
        (attempt(gpu_us=-1), ""),
        (attempt(queue_ms=float("nan")), ""),
        (attempt(total_ms=float("inf")), ""),
        (attempt(kv_byte_ms=1 << 61), ""),
        (attempt(), router_usage_subject("r_test")),
        (outcome(), worker_usage_subject("w0")),
        (residency(NOON_MS, NOON_MS + 1), worker_usage_subject("w0")),
        (ended(), router_usage_subject("r_test")),
        (residency(NOON_MS, NOON_MS + 2 * DAY_MS), ""),
        (residency(NOON_MS, NOON_MS - 1, final=True), ""),
    ],
)
def test_a_record_that_cannot_be_is_refused_and_counted_and_the_rest_of_its_batch_counts(
    book: UsageBook, record: Usage, subject: str
) -> None:
    stream = Stream()
    stream.add(record, subject=subject)
    stream.add(attempt("good"), record if not subject else attempt("good"))
    book.apply([*stream.messages, Stored(3, NOON_MS, worker_usage_subject("w0"), b"\xff\xff")])
    assert (total(book).attempts, total(book).adapter_byte_ms) == (1, 0)
    assert get_number(book.connection, "refused") == (2 if subject else 3)
    assert book.sequence == 3


def test_a_kind_of_record_that_this_version_does_not_know_is_passed_over(book: UsageBook) -> None:
    future = encode([{"type": "of the future", "x": 1}, attempt()])
    book.apply([Stored(1, NOON_MS, worker_usage_subject("w0"), future)])
    assert total(book).attempts == 1


class Crash(Exception):
    pass


@pytest.mark.parametrize("step", ["fetched", "message", "before commit", "after commit"])
@pytest.mark.parametrize("at", range(1, 12, 2))
def test_a_crash_at_any_step_counts_everything_once(tmp_path: Path, step: str, at: int) -> None:
    stream = story()
    expected = fold(tmp_path, "expected", stream.messages)
    steps = 0

    def failpoint(name: str) -> None:
        nonlocal steps
        steps += name == step
        if name == step and steps == at:
            raise Crash

    path = tmp_path / "crashed.sqlite"
    crashes = 0
    while True:
        book = UsageBook(path, failpoint)
        left = [message for message in stream.messages if message.sequence > book.sequence]
        try:
            for start in range(0, len(left), 3):
                book.apply(left[start : start + 3])
        except Crash:
            crashes += 1
        else:
            break
        finally:
            book.close()
    book = UsageBook(path)
    assert crashes == 1 or steps < at
    assert dump(book) == dump(expected)
    assert book.sequence == expected.sequence
    book.close()
    expected.close()


def story() -> Stream:
    """Two days of everything."""
    stream = Stream()
    for hour in range(30):
        at_ms = NOON_MS + hour * 3_600_000
        stream.add(attempt(f"r{hour}", checkpoint=1, final=False), engine(hour + 1), at_ms=at_ms)
        stream.add(outcome(f"r{hour}"), at_ms=at_ms + 50)
        stream.add(residency(NOON_MS, at_ms), at_ms=at_ms + 60)
        if hour % 7 == 3:
            stream.add(ended(), at_ms=at_ms + 70)
        elif hour % 5:
            stream.add(attempt(f"r{hour}", checkpoint=2), at_ms=at_ms + 80)
    return stream


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(repeats=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 21)), max_size=12), split=st.integers(1, 9))
def test_repeats_anywhere_later_in_the_stream_change_no_sum(
    tmp_path_factory: pytest.TempPathFactory, repeats: list[tuple[int, int]], split: int
) -> None:
    records: list[Usage] = []
    for number in range(7):
        records += [attempt(f"r{number}", checkpoint=1, final=False), attempt(f"r{number}", checkpoint=2), outcome(f"r{number}")]
    order: list[Usage] = list(records)
    for source, later in sorted(repeats, key=lambda pair: -pair[1]):
        order.insert(max(later, source) + 1, records[source])
    stream = Stream()
    for record in order:
        stream.add(record)
    book = UsageBook(tmp_path_factory.mktemp("book") / "usage.sqlite")
    for start in range(0, len(stream.messages), split):
        book.apply(stream.messages[start : start + split])
    assert (total(book).requests, total(book).attempts, total(book).completion_tokens) == (7, 7, 56)
    book.close()
