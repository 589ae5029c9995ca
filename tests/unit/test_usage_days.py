"""Days that close: the same bytes whoever closes them, and everything again from them and what the stream holds after them."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.registry.usage_book import UsageBook
from services.registry.usage_days import SnapshotCorrupt, needed_days, sequence_of
from services.registry.usage_tables import get_number
from shared.policy.usage_rollup import GRACE_MS
from tests.unit.test_usage_book import dump, fold, story, total
from tests.usage_records import DAY_MS, NOON_MS, Stream, attempt, outcome, residency

MIDNIGHT_MS = NOON_MS + DAY_MS // 2


def closed(book: UsageBook) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
    days = book.connection.execute("SELECT day, content FROM days ORDER BY day").fetchall()
    return days, book.connection.execute("SELECT sequence, content FROM states ORDER BY sequence").fetchall()


def contents(book: UsageBook) -> dict[str, bytes]:
    return {pending.name.rpartition(".")[2]: pending.content for pending in book.pending() if pending.table == "days"}


def test_a_day_closes_an_hour_after_its_end_with_the_first_message_after_that(tmp_path: Path) -> None:
    stream = Stream()
    stream.add(outcome("a"), at_ms=MIDNIGHT_MS - 1)
    stream.add(outcome("b"), at_ms=MIDNIGHT_MS + GRACE_MS - 1)
    book = fold(tmp_path, "book", stream.messages)
    assert closed(book) == ([], [])
    book.apply([stream.add(outcome("c"), at_ms=MIDNIGHT_MS + GRACE_MS)])
    ((day, _),), ((sequence, state),) = closed(book)
    assert (day, sequence, sequence_of(state), needed_days(state)) == (NOON_MS // DAY_MS, 2, 2, ["2024-10-04"])
    book.close()


def test_what_is_held_over_midnight_is_told_within_the_hour_and_counts_in_both_days(tmp_path: Path) -> None:
    stream = Stream()
    stream.add(residency(MIDNIGHT_MS - 5000, MIDNIGHT_MS + 7000), at_ms=MIDNIGHT_MS + 7000)
    stream.add(residency(MIDNIGHT_MS - 5000, MIDNIGHT_MS + 9000), at_ms=MIDNIGHT_MS + GRACE_MS)
    book = fold(tmp_path, "book", stream.messages)
    day = NOON_MS // DAY_MS
    assert total(book, f"quarter < {(day + 1) * 96}").adapter_byte_ms == 5000 << 30
    assert total(book).adapter_byte_ms == 14_000 << 30
    book.close()


def test_a_late_residency_goes_to_the_first_open_day_whole(tmp_path: Path) -> None:
    stream = Stream()
    stream.add(outcome("a"), at_ms=MIDNIGHT_MS - 1)
    stream.add(residency(NOON_MS, MIDNIGHT_MS), at_ms=MIDNIGHT_MS + 2 * GRACE_MS)
    book = fold(tmp_path, "book", stream.messages)
    assert total(book, f"quarter = {(NOON_MS // DAY_MS + 1) * 96}").adapter_byte_ms == (DAY_MS // 2) << 30
    book.close()


def test_a_repeat_is_known_for_more_than_a_day_after_the_end(tmp_path: Path) -> None:
    stream = Stream()
    stream.add(attempt("a"), at_ms=NOON_MS)
    stream.add(outcome("a"), at_ms=NOON_MS)
    for days in (1, 2):
        stream.add(attempt("a"), at_ms=NOON_MS + days * DAY_MS)
        stream.add(outcome("a"), at_ms=NOON_MS + days * DAY_MS)
    book = fold(tmp_path, "book", stream.messages)
    assert (total(book).requests, total(book).attempts) == (1, 1)
    book.apply([stream.add(outcome("b"), at_ms=NOON_MS + 4 * DAY_MS), stream.add(outcome("c"), at_ms=NOON_MS + 5 * DAY_MS)])
    assert book.connection.execute("SELECT COUNT(*) FROM attempts").fetchone() == (0,)
    book.close()


def test_a_jump_of_the_servers_clock_by_decades_closes_what_there_is_and_no_more(tmp_path: Path) -> None:
    stream = Stream()
    stream.add(outcome("a"), at_ms=NOON_MS)
    stream.add(outcome("b"), at_ms=NOON_MS + 20_000 * DAY_MS)
    stream.add(outcome("c"), at_ms=NOON_MS + DAY_MS)
    book = fold(tmp_path, "book", stream.messages)
    assert [day for day, _ in closed(book)[0]] == [NOON_MS // DAY_MS]
    assert total(book).requests == 3
    book.close()


@settings(max_examples=60, deadline=None)
@given(stamps=st.lists(st.integers(NOON_MS - 3 * DAY_MS, NOON_MS + 9 * DAY_MS), min_size=1, max_size=25), split=st.integers(1, 5))
def test_whatever_the_servers_clock_does_everything_counts_once_and_never_in_a_closed_day(
    tmp_path_factory: pytest.TempPathFactory, stamps: list[int], split: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("clock")
    stream = Stream()
    for number, stamp_ms in enumerate(stamps):
        stream.add(outcome(f"r{number}"), at_ms=stamp_ms)
        stream.add(attempt(f"r{number}"), at_ms=stamp_ms)
        stream.add(residency(NOON_MS - 4 * DAY_MS, NOON_MS - 4 * DAY_MS + number + 1), at_ms=stamp_ms)
    book = UsageBook(tmp_path / "book.sqlite")
    final: dict[int, tuple[object, ...]] = {}
    for start in range(0, len(stream.messages), split):
        book.apply(stream.messages[start : start + split])
        open_from = get_number(book.connection, "open_day")
        for day, content in closed(book)[0]:
            assert day < open_from
            assert final.setdefault(day, (content,)) == (content,)
            lines = book.connection.execute("SELECT SUM(requests), SUM(attempts) FROM lines WHERE quarter / 96 = ?", (day,)).fetchone()
            assert lines == tuple(
                sum(line[3].get(name, 0) for line in msgspec.msgpack.decode(content)["lines"]) for name in ("requests", "attempts")
            )
    counted = total(book)
    assert (counted.requests, counted.attempts, counted.adapter_byte_ms) == (len(stamps), len(stamps), len(stamps) << 30)
    book.close()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(split=st.integers(1, 40), at=st.integers(1, 6))
def test_who_reads_in_other_batches_or_from_a_snapshot_holds_the_same_and_closes_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, split: int, at: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("days")
    stream = story()
    for later in range(3):
        stream.add(outcome(f"later{later}", tenant="renamed"), at_ms=NOON_MS + (3 + later) * DAY_MS)
    whole = fold(tmp_path, "whole", stream.messages)
    pieces = UsageBook(tmp_path / "pieces.sqlite")
    for start in range(0, len(stream.messages), split):
        pieces.apply(stream.messages[start : start + split])
    assert closed(pieces) == closed(whole)
    assert dump(pieces) == dump(whole)
    states = closed(whole)[1]
    sequence, state = states[at % len(states)]
    again = UsageBook(tmp_path / "again.sqlite")
    again.restore(state, {day: contents(whole)[day] for day in needed_days(state)})
    assert again.sequence == sequence
    again.apply([message for message in stream.messages if message.sequence > sequence])
    assert dump(again) == dump(whole)
    assert closed(again)[1][-1] == states[-1]
    assert get_number(again.connection, "refused") == get_number(whole.connection, "refused")
    for book in (whole, pieces, again):
        book.close()


def test_a_day_that_is_not_what_was_closed_is_refused_and_leaves_the_book_empty(tmp_path: Path) -> None:
    whole = fold(tmp_path, "whole", [*story().messages])
    _, ((_, state), *_) = closed(whole)
    days = {day: contents(whole)[day] for day in needed_days(state)}
    day = next(iter(days))
    tampered = msgspec.msgpack.decode(days[day])
    tampered["lines"][0][3]["requests"] = 10_000
    book = UsageBook(tmp_path / "book.sqlite")
    with pytest.raises(SnapshotCorrupt, match=day):
        book.restore(state, {**days, day: msgspec.msgpack.encode(tampered)})
    assert (book.sequence, total(book).requests) == (0, 0)
    book.close()
    whole.close()


def test_only_what_is_stored_and_old_enough_is_spare(tmp_path: Path) -> None:
    stream = Stream()
    for day in range(6):
        stream.add(outcome(f"r{day}"), at_ms=NOON_MS + day * DAY_MS)
    book = fold(tmp_path, "book", stream.messages)
    assert book.spare_before(2) == 0
    for pending in book.pending():
        book.mark_stored(pending)
    assert (book.spare_before(2), book.spare_before(30), book.spare_before(0)) == (4, 0, 6)
    book.close()
