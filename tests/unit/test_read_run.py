"""Which messages a run is made of, and which ends it."""

from __future__ import annotations

import pytest

from kvindex.errors import DecodeError
from kvindex.subscribe.read_run import Run, read_run
from kvindex.wire import live_frames


class Note:
    """A batch of another making: `ts` or `ts@dp_rank`."""

    def __init__(self, payload: bytes) -> None:
        if payload == b"bad":
            raise DecodeError("a bad note")
        if payload == b"bug":
            raise RuntimeError("a planted bug")
        ts, _, dp_rank = payload.partition(b"@")
        self.ts = float(ts)
        self.data_parallel_rank = int(dp_rank) if dp_rank else None


def message(seq: int, payload: bytes | None = None, topic: bytes = b"kv@pod") -> list[bytes]:
    return live_frames(topic, seq, b"%d" % seq if payload is None else payload)


def read(*messages: list[bytes], named: bool = False) -> Run:
    return read_run(messages, 7, b"kv", Note, hash, named=named)


def test_what_follows_is_read_with_what_the_sequencer_needs() -> None:
    run = read(message(7), message(8, b"3.5"), message(9, topic=b"kv"))
    assert run.timestamps == [batch.ts for batch in run.batches] == [7.0, 3.5, 9.0]
    assert run.fingerprints == [hash(b"7"), hash(b"3.5"), hash(b"9")]


def test_a_run_ends_when_time_does_but_has_one_message_at_least() -> None:
    times = iter([True, True, False])
    messages = [message(seq) for seq in range(7, 20)]
    run = read_run(messages, 7, b"kv", Note, hash, named=False, time_left=lambda: next(times))
    assert run.timestamps == [7.0, 8.0, 9.0]


def test_no_messages_are_no_run() -> None:
    assert read() == Run([], [], [])


@pytest.mark.parametrize(
    "odd",
    [
        message(8),
        message(10),
        message(2**64 - 1),
        message(9, topic=b"other"),
        message(9, topic=b"k"),
        message(9, b"bad"),
        message(9, b"9.0@1"),
        [],
        [b"kv"],
        [b"kv", b""],
        [b"kv", b"", b"9"],
        [b"kv", b"\0" * 7 + b"\x09" + b"\0", b"9"],
        [*message(9), b"more"],
    ],
    ids=repr,
)
def test_the_first_message_that_is_not_ordinary_ends_the_run(odd: list[bytes]) -> None:
    run = read(message(7), message(8), odd, message(9))
    assert run.timestamps == [7.0, 8.0]
    assert len(run.batches) == len(run.fingerprints) == 2


def test_a_dp_rank_is_no_news_once_the_publisher_is_named() -> None:
    assert read(message(7, b"7@1"), message(8), named=True).timestamps == [7.0, 8.0]


def test_a_failure_that_is_no_refusal_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="a planted bug"):
        read(message(7), message(8, b"bug"))
