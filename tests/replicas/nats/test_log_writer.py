"""Each event in the life of a log writer, and what it must do then."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvindex.replicas.nats.log import Head
from kvindex.replicas.nats.log_writer import Append, LogWriter, Look, Make, Ready, Rest, WriterState

pytestmark = pytest.mark.unit

STANDING_BY, BEGINNING, WRITING, UNSURE = WriterState
LATER = 1000.0  # after any pause


def standing_by() -> LogWriter:
    """Return a writer that saw another's message at time 0."""
    writer = LogWriter("A", silence=3.0)
    assert writer.step(0.0) == Look()
    writer.saw(Head(7, 1, "B-1"), 0.0)
    assert writer.state is STANDING_BY
    return writer


def beginning() -> LogWriter:
    """Return a writer that is about to append the begin of A-1 after another's message 7."""
    writer = standing_by()
    writer.saw(Head(7, 1, "B-1"), 3.0)
    assert writer.step(3.0) == Append("A-1", 7, b"")
    return writer


def writing(*bodies: bytes, kept_bytes: int = 1000) -> LogWriter:
    """Return a writer of a new log: A-1 begins at 1, and the bodies follow."""
    writer = LogWriter("A", kept_bytes=kept_bytes)
    writer.saw(Head(0, 1, None), 0.0)
    assert writer.step(0.0) == Append("A-1", 0, b"")
    writer.acked(1)
    for body in bodies:
        write(writer, body)
        writer.acked(writer.position + 1)
    return writer


def write(writer: LogWriter, body: bytes) -> None:
    assert writer.step(LATER) == Ready()
    writer.write(body)
    assert writer.step(LATER) == Append(writer.epoch, writer.position, body)


def unsure(*bodies: bytes, kept_bytes: int = 1000) -> LogWriter:
    """Return a writer without an answer to the append of the last body."""
    writer = writing(*bodies[:-1], kept_bytes=kept_bytes)
    write(writer, bodies[-1])
    writer.failed("no answer", LATER)
    assert writer.state is UNSURE
    return writer


# Standing by ----------------------------------------------------------------------------------


def test_a_log_that_grows_is_left_to_its_writer() -> None:
    writer = standing_by()
    for second in range(1, 10):
        assert writer.step(float(second)) == Look()
        writer.saw(Head(7 + second, 1, "B-1"), float(second))
    assert writer.state is STANDING_BY
    assert writer.reason == "another relay writes epoch B-1"


def test_a_log_that_is_silent_for_long_enough_is_begun_after_its_last_message() -> None:
    writer = standing_by()
    writer.saw(Head(7, 1, "B-1"), 2.9)
    assert writer.state is STANDING_BY
    writer.saw(Head(7, 1, "B-1"), 3.0)
    assert writer.step(LATER) == Append("A-1", 7, b"")


@pytest.mark.parametrize("head", [Head(6, 1, "B-1"), Head(7, 1, "C-1"), Head(7, 8, None)])
def test_any_change_of_the_head_ends_the_silence(head: Head) -> None:
    writer = standing_by()
    writer.saw(head, 2.9)
    writer.saw(head, 5.8)
    assert writer.state is STANDING_BY


def test_the_head_is_looked_at_twice_a_second() -> None:
    writer = standing_by()
    assert writer.step(0.1) == Rest(0.5)
    assert writer.step(0.5) == Look()


def test_a_missing_stream_is_made_and_then_begun() -> None:
    writer = LogWriter("A")
    writer.step(0.0)
    writer.saw_no_stream()
    assert writer.step(1.0) == Make()
    writer.made()
    assert writer.step(1.0) == Look()
    writer.saw(Head(0, 1, None), 1.0)
    assert writer.step(1.0) == Append("A-1", 0, b"")


def test_a_stream_that_cannot_be_made_is_tried_again_after_a_pause() -> None:
    writer = LogWriter("A")
    writer.saw_no_stream()
    writer.failed("no suitable peers", 1.0)
    assert isinstance(writer.step(1.0), Rest)
    assert writer.step(LATER) == Make()
    assert writer.reason == "no suitable peers"


# Beginning ------------------------------------------------------------------------------------


def test_a_begin_that_is_acknowledged_starts_the_epoch() -> None:
    writer = beginning()
    writer.acked(8)
    assert (writer.state, writer.epoch, writer.position) == (WRITING, "A-1", 8)
    assert writer.reason == ""
    assert writer.step(3.0) == Ready()


def test_a_begin_that_another_writer_forestalled_returns_it_to_standing_by() -> None:
    writer = beginning()
    writer.refused()
    writer.saw(Head(8, 1, "C-1"), LATER)
    assert writer.state is STANDING_BY
    assert writer.counters["outrun"] == 1
    assert writer.counters["fenced"] == 0


def test_a_begin_that_was_stored_without_an_answer_starts_the_epoch() -> None:
    writer = beginning()
    writer.failed("no answer", 3.0)
    writer.saw(Head(8, 1, "A-1"), LATER)
    assert (writer.state, writer.position) == (WRITING, 8)


@pytest.mark.parametrize(
    ("outcome", "head", "following"),
    [
        ("failed", Head(7, 1, "B-1"), Append("A-1", 7, b"")),
        ("failed", Head(8, 9, None), Append("A-2", 8, b"")),  # whether 8 was it is unknown
        ("acked", Head(9, 1, "A-1"), Append("A-2", 9, b"")),
        ("refused", Head(8, 1, "A-1", b"foreign"), Append("A-2", 8, b"")),
    ],
    ids=["not stored", "purged meanwhile", "another number", "a foreign one in its place"],
)
def test_a_begin_is_sent_again_as_it_was_if_that_is_sure_and_else_given_up_for_another(
    outcome: str, head: Head, following: Append
) -> None:
    writer = beginning()
    if outcome == "failed":
        writer.failed("no answer", 3.0)
    elif outcome == "acked":
        writer.acked(9)
    else:
        writer.refused()
    assert writer.state is BEGINNING
    writer.saw(head, LATER)
    assert writer.step(LATER) == following


# Writing --------------------------------------------------------------------------------------


def test_bodies_are_appended_each_after_the_one_before() -> None:
    writer = writing(b"one", b"two")
    assert writer.position == 3
    assert writer.counters["appends"] == 2
    write(writer, b"three")


def test_a_step_is_the_same_until_its_result_is_reported() -> None:
    writer = writing()
    writer.write(b"one")
    assert writer.step(1.0) == writer.step(2.0) == Append("A-1", 1, b"one")


def test_a_body_with_another_number_than_expected_makes_it_look() -> None:
    writer = writing(b"one")
    write(writer, b"two")
    writer.acked(9)
    assert (writer.state, writer.position) == (UNSURE, 2)
    assert isinstance(writer.step(LATER), Rest)
    assert writer.step(2 * LATER) == Look()


def test_an_answer_after_the_epoch_was_abandoned_is_of_no_account() -> None:
    writer = writing(b"one")
    write(writer, b"two")
    writer.abandon("a message is missing")
    writer.acked(3)
    assert writer.reason == "a message is missing"
    writer.saw(Head(3, 1, "A-1"), LATER)
    assert writer.step(2 * LATER) == Append("A-2", 3, b"")


@pytest.mark.parametrize("result", ["refused", "failed"])
def test_a_refused_or_unanswered_append_makes_it_look_after_a_pause(result: str) -> None:
    writer = writing(b"one")
    write(writer, b"two")
    writer.refused() if result == "refused" else writer.failed("no answer", LATER)
    assert writer.state is UNSURE
    assert writer.step(LATER) == Rest(LATER + 0.1)
    assert writer.step(LATER + 0.1) == Look()


def test_pauses_double_up_to_two_seconds_until_a_body_is_stored() -> None:
    writer = writing()
    write(writer, b"one")
    now, pauses = LATER, []
    for _ in range(7):
        writer.failed("no space left", now)
        rest = writer.step(now)
        assert isinstance(rest, Rest)
        pauses.append(round(rest.until - now, 6))
        now = rest.until
        assert writer.step(now) == Look()
        writer.saw(Head(1, 1, "A-1"), now)
        assert writer.step(now) == Append("A-1", 1, b"one")
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    writer.acked(2)
    writer.write(b"two")
    writer.failed("no answer", now)
    assert writer.step(now) == Rest(now + 0.1)


# Unsure: going on -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bodies", "kept_bytes", "head", "following"),
    [
        ([b"one", b"two"], 1000, Head(3, 1, "A-1", b"two"), Ready()),
        ([b"one", b"two"], 1000, Head(2, 1, "A-1", b"one"), Append("A-1", 2, b"two")),
        ([b"1", b"2", b"last"], 6, Head(2, 1, "A-1", b"1"), Append("A-1", 2, b"2")),
        ([b"old", b"x" * 2000, b"y"], 1, Head(3, 1, "A-1", b"x" * 2000), Append("A-1", 3, b"y")),
    ],
    ids=["it was stored", "not stored", "all that is kept forgotten", "the newest always kept"],
)
def test_an_unanswered_append_is_repeated_only_where_the_log_lacks_it(
    bodies: list[bytes], kept_bytes: int, head: Head, following: Append | Ready
) -> None:
    writer = unsure(*bodies, kept_bytes=kept_bytes)
    writer.saw(head, LATER)
    assert (writer.state, writer.position) == (WRITING, head.seq)
    assert writer.step(2 * LATER) == following


def test_acknowledged_bodies_that_the_log_forgot_are_appended_again_in_order() -> None:
    writer = unsure(b"one", b"two", b"three")
    writer.saw(Head(1, 1, "A-1"), LATER)
    assert (writer.position, writer.counters["forgotten"]) == (1, 2)
    for number, body in enumerate((b"one", b"two", b"three"), 1):
        assert writer.step(2 * LATER) == Append("A-1", number, body)
        writer.acked(number + 1)
    assert writer.counters["appended_again"] == 3
    assert writer.step(2 * LATER) == Ready()


def test_forgotten_bodies_that_late_appends_put_back_are_not_repeated() -> None:
    writer = unsure(b"one", b"two", b"three")
    writer.saw(Head(1, 1, "A-1"), LATER)
    writer.refused()  # late copies of the first two were stored meanwhile
    writer.saw(Head(3, 1, "A-1", b"two"), LATER)
    assert writer.step(2 * LATER) == Append("A-1", 3, b"three")


# Unsure: a new epoch --------------------------------------------------------------------------


@pytest.mark.parametrize("head", [Head(3, 4, None), Head(2, 3, None), Head(0, 1, None)])
def test_a_purge_of_the_last_message_ends_the_epoch(head: Head) -> None:
    writer = unsure(b"one", b"two")
    writer.saw(head, LATER)
    writer.saw(head, LATER)
    assert writer.step(2 * LATER) == Append("A-2", head.seq, b"")


def test_a_log_that_refuses_again_and_again_what_fits_ends_the_epoch() -> None:
    writer = writing()
    write(writer, b"one")
    for refusals in range(1, 10):
        writer.refused()
        writer.saw(Head(1, 1, "A-1"), LATER)
        assert writer.state is (WRITING if refusals <= 8 else BEGINNING)


def test_a_log_that_forgot_more_than_is_kept_ends_the_epoch() -> None:
    writer = unsure(b"one", b"two", b"three", kept_bytes=0)
    writer.saw(Head(2, 1, "A-1"), LATER)
    assert writer.state is BEGINNING
    writer.saw(Head(2, 1, "A-1"), LATER)
    assert writer.step(2 * LATER) == Append("A-2", 2, b"")
    writer.acked(3)
    assert writer.step(2 * LATER) == Ready()  # nothing of the old epoch is left


FOREIGN = [b"\xff" * 40, b"", b"well-formed"]


@pytest.mark.parametrize("body", FOREIGN)
def test_a_foreign_message_with_the_next_number_of_the_epoch_ends_it(body: bytes) -> None:
    writer = writing(b"one")
    write(writer, b"two")
    writer.refused()
    writer.saw(Head(3, 1, "A-1", body), LATER)
    assert (writer.state, writer.counters["foreign"]) == (BEGINNING, 1)
    assert "another client" in writer.reason
    writer.saw(Head(3, 1, "A-1", body), LATER)
    assert writer.step(2 * LATER) == Append("A-2", 3, b"")


@pytest.mark.parametrize(
    ("bodies", "kept_bytes", "head"),
    [
        *(([b"one"], 1000, Head(2, 1, "A-1", body)) for body in FOREIGN),
        ([b"one", b"two", b"three"], 0, Head(3, 1, "A-1", b"not two")),
        ([b"one", b"two", b"three"], 1000, Head(3, 1, "A-1", b"not two")),
        ([b"one", b"two"], 1000, Head(4, 1, "A-1", b"two")),
        ([b"one", b"two"], 1000, Head(9, 1, "A-1", b"two")),
    ],
)
def test_a_foreign_message_in_any_place_of_the_epoch_ends_it_and_counts_once(
    bodies: list[bytes], kept_bytes: int, head: Head
) -> None:
    writer = unsure(*bodies, kept_bytes=kept_bytes)
    writer.saw(head, LATER)
    assert (writer.state, writer.counters["foreign"]) == (BEGINNING, 1)


def test_a_late_message_of_its_own_earlier_epoch_ends_the_epoch_without_a_wait() -> None:
    writer = writing(b"one")
    writer.abandon("a message is missing")
    writer.saw(Head(2, 1, "A-1"), LATER)
    assert writer.step(2 * LATER) == Append("A-2", 2, b"")
    writer.refused()
    writer.saw(Head(3, 1, "A-1"), 3 * LATER)
    assert writer.step(3 * LATER) == Append("A-3", 3, b"")


def test_a_head_of_its_own_earlier_epoch_ends_the_epoch_even_at_a_number_it_gave() -> None:
    writer = writing(b"one")
    writer.abandon("a message is missing")
    writer.saw(Head(2, 1, "A-1"), 2 * LATER)
    writer.acked(3)
    writer.step(2 * LATER)
    writer.write(b"two")
    writer.failed("no answer", 2 * LATER)
    writer.saw(Head(3, 1, "A-1"), 3 * LATER)  # the log forgot the begin, and got a late append
    assert writer.state is BEGINNING


@pytest.mark.parametrize("make", [beginning, partial(unsure, b"one")], ids=["beginning", "unsure"])
def test_a_stream_that_was_deleted_is_made_anew_for_another_epoch(
    make: Callable[[], LogWriter],
) -> None:
    writer = make()
    writer.failed("no stream", LATER)
    writer.saw_no_stream()
    assert writer.step(2 * LATER) == Make()
    writer.made()
    assert writer.step(2 * LATER) == Look()
    writer.saw(Head(0, 1, None), 2 * LATER)
    assert writer.step(2 * LATER) == Append("A-2", 0, b"")


def test_an_abandoned_epoch_is_followed_by_another_that_starts_empty() -> None:
    writer = writing(b"one")
    writer.abandon("a message is missing")
    assert (writer.state, writer.reason) == (BEGINNING, "a message is missing")
    writer.saw(Head(2, 1, "A-1"), 2 * LATER)
    assert writer.step(2 * LATER) == Append("A-2", 2, b"")
    writer.acked(3)
    assert writer.position == 3
    assert writer.step(2 * LATER) == Ready()
    writer.write(b"first of the second epoch")
    assert writer.step(2 * LATER) == Append("A-2", 3, b"first of the second epoch")


@pytest.mark.parametrize("make", [standing_by, beginning])
def test_nothing_is_abandoned_where_no_epoch_has_begun(make: Callable[[], LogWriter]) -> None:
    writer = make()
    state = writer.state
    writer.abandon("a message is missing")
    assert writer.state is state


# Unsure: fenced -------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", ["B-1", "AB-1", "nonsense"])
def test_a_writer_that_was_stopped_is_fenced_by_its_next_append(epoch: str) -> None:
    writer = writing(b"one")
    write(writer, b"two")
    writer.refused()
    writer.saw(Head(5, 1, epoch), LATER)
    assert (writer.state, writer.counters["fenced"]) == (STANDING_BY, 1)
    assert writer.reason == f"another relay writes epoch {epoch}"
    writer.saw(Head(5, 1, epoch), LATER + 2.9)
    assert writer.state is STANDING_BY
    writer.saw(Head(5, 1, epoch), LATER + 3.0)
    assert writer.step(2 * LATER) == Append("A-2", 5, b"")
    writer.acked(6)
    assert writer.step(2 * LATER) == Ready()  # the body of the fenced epoch is gone


# Cost -----------------------------------------------------------------------------------------


def test_a_new_epoch_keeps_as_many_bytes_as_the_one_before() -> None:
    writer = writing(b"x" * 900, kept_bytes=1000)
    writer.abandon("a message is missing")
    writer.saw(Head(2, 1, "A-1"), 2 * LATER)
    writer.acked(3)
    for seq in (4, 5):
        writer.write(b"y" * 500)
        writer.acked(seq)
    writer.write(b"z")
    writer.failed("no answer", 2 * LATER)
    writer.saw(Head(4, 1, "A-2", b"y" * 500), 3 * LATER)
    assert writer.step(3 * LATER) == Append("A-2", 4, b"y" * 500)
