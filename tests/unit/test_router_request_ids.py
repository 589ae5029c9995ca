"""Request ids are real ULIDs: the library reads back the time and they sort by it."""

import time

from ulid import ULID

from services.router.request_ids import RequestIds


def test_an_id_is_a_ulid_of_the_present_millisecond() -> None:
    before = time.time_ns() // 1_000_000
    read = ULID.from_str(RequestIds().next())
    assert before <= read.milliseconds <= time.time_ns() // 1_000_000
    assert str(read) == str(ULID.from_bytes(read.bytes))


def test_ids_do_not_repeat_and_later_milliseconds_sort_later() -> None:
    ids = RequestIds()
    made = [ids.next() for _ in range(20_000)]
    assert len(set(made)) == len(made)
    assert [text[:10] for text in made] == sorted(text[:10] for text in made)
