"""An answer put together from frames, in whatever order and number they come."""

from hypothesis import given
from hypothesis import strategies as st

from services.router.streams import Answer, Bounced
from shared.contracts.errors import ErrorInfo
from shared.contracts.inference import Frame, FrameKind, Head, Totals, encode
from shared.errors import DeadlineExceeded, Overloaded, WorkerLost

TOO_MUCH = Overloaded("too much")


def answer(limit_bytes: int = 1 << 20) -> Answer:
    return Answer(
        request_id="r",
        attempt=1,
        worker_id="w",
        stream=True,
        now_s=0.0,
        accept_timeout_s=0.3,
        expires_s=100.0,
        limit_bytes=limit_bytes,
        too_much=TOO_MUCH,
    )


def frames(count: int) -> list[Frame]:
    kinds = [(FrameKind.ACCEPTED, b""), (FrameKind.HEAD, encode(Head(status=200)))]
    kinds += [(FrameKind.BODY, b"%d;" % number) for number in range(count)]
    kinds.append((FrameKind.END, encode(Totals(completion_tokens=count))))
    return [Frame("r", 1, seq, kind, data) for seq, (kind, data) in enumerate(kinds)]


@given(st.data())
def test_any_order_with_any_doubles_gives_the_same_whole_answer(data: st.DataObject) -> None:
    sent = frames(data.draw(st.integers(1, 12)))
    shuffled = data.draw(st.permutations(sent))
    doubles = data.draw(st.lists(st.sampled_from(sent), max_size=10))
    got = answer()
    taken = b""
    for frame in [*shuffled, *doubles]:
        got.receive(frame, 1.0)
        taken += got.take()
    assert taken == b"".join(frame.data for frame in sent if frame.kind == FrameKind.BODY)
    assert got.totals is not None
    assert got.gap_s is None


@given(st.integers(0, 7), st.data())
def test_an_answer_with_a_frame_missing_is_never_over(missing: int, data: st.DataObject) -> None:
    sent = frames(5)
    got = answer()
    asked = [got.receive(frame, 1.0) for frame in data.draw(st.permutations([frame for frame in sent if frame.seq != missing]))]
    assert not got.over
    assert got.next_seq <= missing
    assert any(asked) or missing == len(sent) - 1


def test_a_gap_is_told_once_and_closed_by_what_was_missing() -> None:
    got = answer()
    sent = frames(3)
    assert not got.receive(sent[0], 1.0)
    assert got.receive(sent[2], 2.0)
    assert not got.receive(sent[3], 2.5)
    assert got.gap_s == 2.0
    assert not got.receive(sent[1], 3.0)
    assert got.gap_s is None
    assert got.take() == b"0;1;"


def test_progress_shows_a_lost_tail_and_is_otherwise_only_a_sign_of_life() -> None:
    got = answer()
    got.receive(frames(3)[0], 1.0)
    assert not got.receive(Frame("r", 1, 0, FrameKind.PROGRESS), 2.0)
    assert got.heard_s == 2.0
    assert got.receive(Frame("r", 1, 1, FrameKind.PROGRESS), 3.0)


def test_more_than_the_bound_ends_it_with_the_error_of_the_bound() -> None:
    got = answer(limit_bytes=5)
    for frame in frames(9):
        got.receive(frame, 1.0)
    assert got.error is TOO_MUCH
    assert not got.lost


def test_what_ended_it_first_stays() -> None:
    got = answer()
    got.fail(DeadlineExceeded("first"))
    got.fail(WorkerLost("second"), lost=True)
    for frame in frames(2):
        got.receive(frame, 1.0)
    assert isinstance(got.error, DeadlineExceeded)
    assert not got.lost
    assert got.totals is None


def test_a_bounce_and_a_lost_worker_allow_another_attempt_and_other_errors_do_not() -> None:
    bounced, lost, refused = answer(), answer(), answer()
    bounced.receive(Frame("r", 1, 0, FrameKind.BOUNCED, b"draining"), 1.0)
    lost.receive(Frame("r", 1, 0, FrameKind.ERROR, encode(ErrorInfo(code="worker_lost", message="stopped"))), 1.0)
    refused.receive(Frame("r", 1, 0, FrameKind.ERROR, encode(ErrorInfo(code="overloaded", message="full", fields={"held": 3}))), 1.0)
    assert isinstance(bounced.error, Bounced)
    assert (bounced.lost, lost.lost, refused.lost) == (True, True, False)
    assert refused.error is not None
    assert refused.error.fields == {"held": 3}


def test_frames_that_come_ahead_are_kept_within_the_bound_and_asked_for_again() -> None:
    got = answer(limit_bytes=100)
    large = [Frame("r", 1, seq, FrameKind.BODY, b"x" * 60) for seq in range(1, 6)]
    for frame in large:
        got.receive(frame, 1.0)
    assert got.ahead_bytes <= 160
    got.receive(frames(1)[0], 2.0)
    assert got.next_seq == 3
    assert got.ahead_bytes == 0
