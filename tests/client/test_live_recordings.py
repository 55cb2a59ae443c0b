"""Recorded frames of real engines through real sockets: the index equals what the engine held."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvindex import Index, Rank, Worker
from kvindex.wire import read_recording, replay_request
from tests.captures import CAPTURES, NAMES
from tests.live import PATIENCE, client_of, wait_status

pytestmark = pytest.mark.conformance

RANK = Rank("engine", 0)


class Recorded:
    """A publisher of recorded frames: live ones by hand, replay by a thread of its own."""

    def __init__(self, name: str) -> None:
        messages = list(read_recording(CAPTURES / f"{name}.frames"))
        self.live = [m.frames for m in messages if m.kind == "live"]
        self.replies = [m.frames for m in messages if m.kind == "replay"]
        self.last_seq = int.from_bytes(self.live[-1][1], "big")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.sndhwm = 0
        self._pub.sndhwm = 0
        ports = [s.bind_to_random_port("tcp://127.0.0.1") for s in (self._pub, self._router)]
        self.endpoint, self.replay_endpoint = (f"tcp://127.0.0.1:{port}" for port in ports)
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind("inproc://stop")
        self._thread = threading.Thread(target=self._serve_replay, daemon=True)
        self._thread.start()

    def wait_for_subscriber(self) -> None:
        assert self._pub.poll(int(PATIENCE * 1000))
        self._pub.recv()

    def send(self, frames: list[bytes]) -> None:
        self._pub.send_multipart(frames)

    def _serve_replay(self) -> None:
        """Answer as the recorded engine did, byte for byte, from the asked number on."""
        stopped = self._context.socket(zmq.PAIR)
        stopped.connect("inproc://stop")
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(stopped, zmq.POLLIN)
        while not any(ready is stopped for ready, _ in poller.poll()):
            identity, *request = self._router.recv_multipart()
            start = int.from_bytes(request[-1], "big")
            assert request == replay_request(start)
            for frames in self.replies:
                if int.from_bytes(frames[-2], "big") >= start:
                    self._router.send_multipart([identity, *frames])
        stopped.close(0)

    def close(self) -> None:
        self._stop.send(b"")
        self._thread.join(PATIENCE)
        self._context.destroy(linger=0)


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> Iterator[Recorded]:
    recorded = Recorded(request.param)
    yield recorded
    recorded.close()


def everything(index: Index) -> set[Any]:
    return {msgspec.structs.astuple(block) for block in index.tree(RANK).walk()}


@pytest.mark.parametrize("recorded", NAMES, indirect=True)
@pytest.mark.parametrize("way", ["replay alone", "live alone", "live with gaps"])
def test_every_way_of_receiving_a_recording_gives_the_same_index(
    recorded: Recorded, way: str
) -> None:
    index = Index()
    for frames in recorded.live:
        index.apply(RANK, frames[-1])

    replay = None if way == "live alone" else recorded.replay_endpoint
    sent = {"replay alone": [], "live alone": recorded.live, "live with gaps": recorded.live[::3]}
    with client_of(Worker("engine", recorded.endpoint, replay=replay)) as client:
        recorded.wait_for_subscriber()
        wait_status(client, RANK, connected=True)
        for frames in sent[way]:
            recorded.send(frames)
        wait_status(client, RANK, seq=recorded.last_seq, complete=True, losses=0, restarts=0)
        assert everything(client.index) == everything(index)
