"""Any schedule of faults: no hole, no double, no false position, and never a busy writer."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.replicas.nats.log import Head
from kvindex.replicas.nats.log_writer import Append, LogWriter, Look, Make, Ready, Rest, WriterState
from tests.examples import examples
from tests.replicas.nats import schedules

pytestmark = pytest.mark.property


@examples(40)
@given(st.randoms(use_true_random=False))
def test_one_to_three_writers_keep_the_log_whole_whatever_happens(random: Random) -> None:
    schedules.run(random)


@examples(400, 100_000)
@given(st.integers(0, 2**63))
def test_long_schedules_keep_the_log_whole(seed: int) -> None:
    schedules.run(Random(seed))


def test_roll_back_and_as_many_foreign_messages_fence_the_writer() -> None:
    """The number of its next append fits by chance, the epoch does not."""
    stream = schedules.Stream()
    stream.make()
    owner = schedules.Owner("A", stream, 1000)
    joined_before, has_all = schedules.Reader(stream), schedules.Reader(stream)

    def go_on() -> None:
        step = owner.writer.step(0.0)
        if isinstance(step, Ready):
            owner.write()
            step = owner.writer.step(0.0)
        assert isinstance(step, (Look, Append))
        owner.step = step
        owner.carry_out()
        owner.report(0.0)

    for _ in range(2):
        go_on()
    joined_before.join(owner.writer)
    for _ in range(2):
        go_on()
    has_all.join(owner.writer)
    stream.roll_back(2)
    stream.append("foreign", None, b"")
    stream.append("foreign", None, b"")
    go_on()
    assert owner.writer.state is WriterState.UNSURE
    assert stream.last == 3
    joined_before.read()
    assert not joined_before.is_joined
    has_all.read()
    assert has_all.is_joined


heads = st.builds(
    Head,
    st.integers(0, 4),
    st.just(1),
    st.sampled_from([None, "A-1", "A-2", "A-3", "B-1"]),
    st.sampled_from([b"", b"body", b"foreign"]),
)
results = st.one_of(
    heads,
    st.sampled_from(["right", "wrong", "refused", "failed", "no stream"]),
)


@given(st.lists(results, max_size=60), st.booleans())
def test_no_results_make_a_writer_busy(answers: list[Head | str], abandons: bool) -> None:
    """All answers arrive at once: it rests after a few steps, unless a body was stored."""
    writer, now, busy = LogWriter("A"), 0.0, 0
    for answer in answers:
        step = writer.step(now)
        if isinstance(step, Rest):
            assert step.until > now
            now, busy = step.until, 0
            continue
        busy += 1
        assert busy <= 5
        if isinstance(step, Ready):
            busy -= 1
            if abandons:
                writer.abandon("its queue was full")
            else:
                writer.write(b"body")
        elif isinstance(step, Make):
            writer.made()
        elif isinstance(step, Look):
            look(writer, answer, now)
        elif answer == "right":
            busy = 0 if step.body else busy
            writer.acked(step.expected + 1)
        elif answer == "wrong":
            writer.acked(step.expected + 2)
        elif answer == "refused":
            writer.refused()
        else:
            writer.failed("no answer", now)


def look(writer: LogWriter, answer: Head | str, now: float) -> None:
    if isinstance(answer, Head):
        writer.saw(answer, now)
    elif answer == "no stream":
        writer.saw_no_stream()
    else:
        writer.failed("no answer", now)


@pytest.mark.parametrize(
    "trouble", ["no answers", "full disk", "refusals", "foreign", "purges", "no stream"]
)
def test_steady_trouble_costs_a_few_steps_a_second(trouble: str) -> None:
    """For 100 seconds all answers arrive at once, and there is a body to write each second."""
    stream = schedules.Stream()
    stream.make()
    owner = schedules.Owner("A", stream, 1000)
    now, steps = 0.0, 0
    while now < 100.0:
        step = owner.writer.step(now)
        steps += 1
        assert steps <= 100 * 10
        if isinstance(step, Rest):
            now = step.until
        elif isinstance(step, Ready):
            now += 1.0
            owner.write()
        else:
            owner.step = step
            answer_in_trouble(owner, stream, trouble)
            owner.report(now)


def answer_in_trouble(owner: schedules.Owner, stream: schedules.Stream, trouble: str) -> None:
    appends = isinstance(owner.step, Append)
    if trouble == "full disk" and appends:
        owner.outcome = "no space left"
        return
    if trouble == "refusals" and appends:
        owner.outcome = "refused"
        return
    owner.carry_out()
    if trouble == "no answers":
        owner.outcome = "no answer"
    elif trouble == "foreign":
        stream.append("foreign", None, b"")
    elif trouble == "purges":
        stream.purge()
    elif trouble == "no stream":
        stream.delete()
