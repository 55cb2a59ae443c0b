"""Collectives over a star, one end of it at a time: the other ends are bare sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec
import pytest

from kvindex.errors import ConfigurationError, DecodeError, PeerDiedError, QueueTimeoutError
from kvindex.shm.groups import tcp_star as tcp_star
from kvindex.shm.groups.tcp_frames import Connection, FrameReader, frame
from kvindex.shm.groups.tcp_messages import Call, Failure, GroupFailure, Part, listed, read_word
from kvindex.shm.groups.tcp_star import Hub, Spoke

LIMIT = 1024


class Ends:
    """Rank 0 of a group of three, and the sockets of the others; or rank 1 and that of rank 0."""

    def __init__(self) -> None:
        self.peers: dict[int, socket.socket] = {}
        self.hub = Hub({rank: self._connection(rank) for rank in (1, 2)})
        self.spoke = Spoke(1, 3, self._connection(0))

    def _connection(self, peer: int) -> Connection:
        ours, self.peers[peer] = socket.socketpair()
        return Connection(ours, LIMIT)

    def say(self, rank: int, *words: Part | Failure) -> None:
        self.peers[rank].sendall(b"".join(frame(msgspec.msgpack.encode(word)) for word in words))

    def heard(self, rank: int) -> list[Part | Failure]:
        """All that a peer was sent so far."""
        reader, words = FrameReader(1 << 20), []
        self.peers[rank].settimeout(0)
        try:
            while data := self.peers[rank].recv(1 << 20):
                reader.feed(data)
        except BlockingIOError:
            pass
        while (body := reader.next_frame()) is not None:
            words.append(read_word(body, rank))
        return words

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        self.hub.close()
        self.spoke.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def call(operation: str, root: int, number: int = 0, timeout: float = 0.02) -> Call:
    return Call(number, operation, root, timeout, time.monotonic() + timeout)


def part(of: Call, origin: int, data: bytes) -> Part:
    return Part(of.number, of.operation, of.root, origin, data)


def test_the_hub_passes_a_broadcast_to_all_but_its_source(ends: Ends) -> None:
    broadcast = call("broadcast_object", 2)
    ends.say(2, part(broadcast, 2, b"x"))
    assert ends.hub.broadcast(broadcast, b"ignored") == b"x"
    assert ends.heard(1) == [part(broadcast, 2, b"x")]
    assert ends.heard(2) == []


def test_the_hub_passes_a_gather_on_rank_by_rank(ends: Ends) -> None:
    gather = call("gather_object", 2)
    ends.say(2, part(gather, 2, b"two"))
    ends.say(1, part(gather, 1, b"one"))
    assert ends.hub.gather(gather, b"zero") is None
    assert ends.heard(2) == [part(gather, 0, b"zero"), part(gather, 1, b"one")]


def test_a_rank_that_is_ahead_by_many_calls_loses_none_of_them(ends: Ends) -> None:
    gathers = [call("gather_object", 0, number) for number in range(5)]
    ends.say(1, *(part(gather, 1, bytes([gather.number])) for gather in gathers))
    for gather in gathers:
        ends.say(2, part(gather, 2, b"two"))
        assert ends.hub.gather(gather, b"") == [b"", bytes([gather.number]), b"two"]


def test_a_rank_may_leave_after_its_last_part(ends: Ends) -> None:
    gather = call("gather_object", 0, timeout=5.0)
    ends.say(1, part(gather, 1, b"one"))
    ends.peers[1].close()
    ends.say(2, part(gather, 2, b"two"))
    assert ends.hub.gather(gather, b"zero") == [b"zero", b"one", b"two"]
    with pytest.raises(GroupFailure, match=r"rank 1 is gone .* during barrier with rank 0"):
        ends.hub.broadcast(call("barrier", 0, 1), b"")


def test_a_dead_rank_is_named_though_another_is_awaited(ends: Ends) -> None:
    ends.peers[1].close()
    with pytest.raises(GroupFailure) as caught:
        ends.hub.broadcast(call("broadcast_object", 2, 7, timeout=5.0), b"")
    error = caught.value.failure.error()
    assert isinstance(error, PeerDiedError)
    assert "rank 1 is gone" in str(error)
    assert "broadcast_object with rank 2, collective 7" in str(error)


def test_the_hub_names_who_is_missing_when_time_is_up(ends: Ends) -> None:
    gather = call("gather_object", 0)
    ends.say(1, part(gather, 1, b""))
    with pytest.raises(GroupFailure) as caught:
        ends.hub.gather(gather, b"")
    error = caught.value.failure.error()
    assert isinstance(error, QueueTimeoutError)
    assert error.timeout == gather.timeout
    assert str(error).startswith("rank 2 did not take part within 0.02 s in gather_object")


def test_the_hub_judges_when_a_rank_gives_up_before_it(ends: Ends) -> None:
    broadcast = call("broadcast_object", 2, timeout=60.0)
    ends.say(1, Failure("timeout", "rank 0 did not ...", 0.5))
    with pytest.raises(GroupFailure, match=r"^rank 2 did not take part .*; rank 1 gave up$"):
        ends.hub.broadcast(broadcast, b"")


def test_a_hub_that_comes_late_says_so(ends: Ends) -> None:
    ends.say(1, Failure("timeout", "rank 0 did not ...", 0.5))
    with pytest.raises(GroupFailure, match=r"^rank 0, which came late, did not"):
        ends.hub.broadcast(call("broadcast_object", 0), b"")


@pytest.mark.parametrize(
    "other", [call("barrier", 0), call("gather_object", 2), call("gather_object", 0, number=1)]
)
def test_ranks_that_call_different_things_find_out(ends: Ends, other: Call) -> None:
    gather = call("gather_object", 0)
    ends.say(1, part(other, 1, b""))
    with pytest.raises(GroupFailure, match=f"rank 0 calls {gather}, but rank 1 is at {other}"):
        ends.hub.gather(gather, b"")
    ends.say(0, part(other, 0, b""))
    with pytest.raises(GroupFailure, match=f"rank 1 calls .*, but rank 0 is at {other}") as caught:
        ends.spoke.broadcast(call("broadcast_object", 0), b"")
    assert isinstance(caught.value.failure.error(), ConfigurationError)


def test_a_failure_of_one_rank_is_every_ranks(ends: Ends) -> None:
    failure = Failure("mismatch", "rank 1 calls what nobody does")
    ends.say(1, failure)
    with pytest.raises(GroupFailure) as caught:
        ends.hub.gather(call("gather_object", 0), b"")
    assert caught.value.failure == failure
    ends.hub.tell(failure)
    assert ends.heard(2) == [failure]


@pytest.mark.parametrize(
    "garbage", [frame(b"\xc1"), frame(b""), b"\xff\xff\xff\xff", (LIMIT + 1).to_bytes(4, "big")]
)
def test_garbage_from_a_rank_is_refused_and_the_rank_named(ends: Ends, garbage: bytes) -> None:
    ends.peers[2].sendall(garbage)
    with pytest.raises(GroupFailure, match="rank 2 sent") as caught:
        ends.hub.gather(call("gather_object", 0), b"")
    assert isinstance(caught.value.failure.error(), DecodeError)
    ends.peers[0].sendall(garbage)
    with pytest.raises(GroupFailure, match="rank 0 sent"):
        ends.spoke.broadcast(call("broadcast_object", 0), b"")


def test_a_part_of_the_wrong_rank_is_refused(ends: Ends) -> None:
    gather = call("gather_object", 1)
    ends.spoke.tell(Failure("died", "not looked at"))
    ends.say(0, part(gather, 2, b"two"))
    with pytest.raises(GroupFailure, match="the part of rank 2 where"):
        ends.spoke.gather(gather, b"one")


def test_a_spoke_hears_bad_news_before_it_sends(ends: Ends) -> None:
    ends.say(0, Failure("died", "rank 2 is gone"))
    with pytest.raises(GroupFailure, match="rank 2 is gone"):
        ends.spoke.gather(call("gather_object", 0), b"one")
    assert ends.heard(0) == []


def test_a_spoke_without_answer_tells_and_blames_the_hub(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_star, "VERDICT_SECONDS", 0.02)
    with pytest.raises(GroupFailure, match=r"^rank 0 did not take part") as caught:
        ends.spoke.broadcast(call("broadcast_object", 2), b"")
    assert ends.heard(0) == [caught.value.failure]
    assert caught.value.failure.kind == "timeout"


def test_a_spoke_whose_hub_is_gone_says_so_at_once(ends: Ends) -> None:
    ends.peers[0].close()
    for collective in (ends.spoke.broadcast, ends.spoke.gather):
        with pytest.raises(GroupFailure, match="rank 0 is gone"):
            collective(call("barrier", 0, timeout=60.0), b"")


def test_many_ranks_are_named_up_to_a_bound() -> None:
    assert listed(set(range(20))).endswith("14, 15 and 4 more")


def test_a_failure_is_short_enough_for_its_frame() -> None:
    word = read_word(Failure("died", "x" * 100_000).encode(), 1)
    assert isinstance(word, Failure)
    assert len(word.text) == 512
