"""`python -m benchmarks.feed SPEC`: publish a workload, one publisher for each rank.

Everything is encoded before anything is sent, and nothing is dropped: what is to go fast is one
stream for each rank that waits for its reader; with a paced part all goes through PUB sockets
without a limit on what may queue.

Speaks JSON lines: says `{"endpoints": …}`, then `{"joined": true}` when every rank has its
subscriber; waits for a line, sends the fast part, says `{"seconds": …, "prompts": …}`; waits for
a line, sends a part of what is paced, says `{"sent": true}`, and so on; and stays until stdin ends.
With a rate of batches it says `{"sent": [[marker, time.perf_counter()], …]}`.
"""

from __future__ import annotations

import gc
import json
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, zip_longest
from typing import Any, Final, TypeAlias

import zmq

from benchmarks.feed.spec import MARKS_PER_SECOND, FeedSpec, marker
from benchmarks.feed.zmtp import accept_subscriber, flood, framed
from benchmarks.workload import (
    EVERYWHERE,
    PROMPT_TOKENS,
    SENTINEL,
    Change,
    Fleet,
    Message,
    MsgpackEncoder,
    Prompt,
    long_prompts,
    messages,
)
from benchmarks.workload.payloads import Piece

SAMPLES: Final = 32  # prompts by which the answers are checked
_SLICE: Final = 0.0005  # seconds of sending at a time when paced

Queues: TypeAlias = list[list[Message]]
"""Each rank's messages, in order."""


def main() -> None:
    """Publish what the specification on the command line says."""
    spec = FeedSpec.from_dict(json.loads(sys.argv[1]))
    fleet = Fleet(spec.ranks, seed=spec.source.seed)
    if spec.batch_rate:
        _publish_voices(spec, fleet)
    elif spec.paced_blocks:
        _publish_paced(spec, fleet)
    else:
        _publish_fast(spec, fleet)


def _publish_fast(spec: FeedSpec, fleet: Fleet) -> None:
    queues = _queues(spec, spec.source.changes(fleet, spec.blocks))
    requests = islice(spec.source.requests(), SAMPLES)
    prompts = [fleet.prompt(request.prompt, cut=PROMPT_TOKENS) for request in requests]
    _extend(queues, spec, fleet.place_everywhere(SENTINEL))
    streams = [
        b"".join(framed(_parts(seq, message)) for seq, message in enumerate(queue))
        for queue in queues
    ]
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=1) for _ in queues]
    endpoints = [f"tcp://127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    _say(endpoints=endpoints, blocks=fleet.entries, batches=sum(map(len, queues)))
    connections = [accept_subscriber(listener) for listener in listeners]
    _say(joined=True)
    if sys.stdin.readline():
        started = time.perf_counter()
        flood(zip(connections, streams, strict=True))
        _say(seconds=time.perf_counter() - started, prompts=_plain(prompts))
        sys.stdin.read()


def _publish_paced(spec: FeedSpec, fleet: Fleet) -> None:
    queues, prompts, later = _filled(spec, fleet)
    fast, paced = _in_turn(queues, [0] * spec.ranks), _in_turn(later, list(map(len, queues)))
    with zmq.Context() as context:
        sockets = [context.socket(zmq.XPUB) for _ in queues]
        for publisher in sockets:
            publisher.linger = 0
            publisher.set_hwm(0)
            publisher.bind("tcp://127.0.0.1:*")
        endpoints = [publisher.getsockopt_string(zmq.LAST_ENDPOINT) for publisher in sockets]
        _say(endpoints=endpoints, blocks=fleet.entries, batches=len(fast) + len(paced))
        for publisher in sockets:
            publisher.recv()  # the subscription
        _say(joined=True)
        if sys.stdin.readline():
            _pace(sockets, fast, spec.fill_rate or float("inf"))
            _say(seconds=0.0, prompts=_plain(prompts))
        size = -(-len(paced) // spec.paced_parts)
        for first in range(0, len(paced), size):
            if sys.stdin.readline():
                _pace(sockets, paced[first : first + size], spec.rate)
                _say(sent=True)
        sys.stdin.read()
        for publisher in sockets:
            publisher.close()


def _publish_voices(spec: FeedSpec, fleet: Fleet) -> None:
    queues, prompts, later = _filled(spec, fleet)
    fast = _in_turn(queues, [0] * spec.ranks)
    voices = list(_with_markers(spec, fleet, later, list(map(len, queues))))
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=1) for _ in queues]
    endpoints = [f"tcp://127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    _say(endpoints=endpoints, blocks=fleet.entries, batches=len(voices))
    connections = [accept_subscriber(listener) for listener in listeners]
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _say(joined=True)
    gc.disable()  # a pause of this process would count as age
    if sys.stdin.readline():
        for message, parts in fast:
            connections[message.rank].sendall(framed(parts))
        _say(seconds=0.0, prompts=_plain(prompts))
    if sys.stdin.readline():
        _say(sent=_speak(connections, voices, spec.batch_rate))
        sys.stdin.read()


def _filled(spec: FeedSpec, fleet: Fleet) -> tuple[Queues, list[Prompt], Queues]:
    """Return what is sent before the paced part, prompts with their answers, and that part."""
    queues = _queues(spec, fleet.place_everywhere(EVERYWHERE))
    _extend(queues, spec, spec.source.changes(fleet, spec.blocks))
    requests = long_prompts(fleet, islice(spec.source.requests(), 100 * SAMPLES), SAMPLES - 1)
    prompts = [fleet.prompt(EVERYWHERE), *requests]
    _extend(queues, spec, fleet.place_everywhere(SENTINEL))
    later = replace(spec.source, seed=spec.source.seed + 1)
    return queues, prompts, _queues(spec, later.changes(fleet, fleet.entries + spec.paced_blocks))


_Voice: TypeAlias = tuple[int, bytes, int | None]
"""A rank, its next message on the wire, and the marker in it."""


def _with_markers(
    spec: FeedSpec, fleet: Fleet, queues: Queues, seqs: list[int]
) -> Iterator[_Voice]:
    """Yield what is paced, the ranks in turn, with markers between at the wanted rate."""
    every = max(1, round(spec.batch_rate / MARKS_PER_SECOND))
    number = 0
    for place, message in enumerate(filter(None, chain.from_iterable(zip_longest(*queues)))):
        if place % every == 0:
            rank = number * 7 % spec.ranks
            [mark] = _encoded(spec, fleet.place_segments(rank, marker(number)))
            yield rank, framed(_parts(seqs[rank], mark)), number
            seqs[rank] += 1
            number += 1
        yield message.rank, framed(_parts(seqs[message.rank], message)), None
        seqs[message.rank] += 1


def _speak(
    connections: Sequence[socket.socket], voices: Sequence[_Voice], rate: float
) -> list[tuple[int, float]]:
    """Send each message when it is due; return when each marker was sent."""
    sent = []
    due = time.perf_counter()
    for rank, wire, mark in voices:
        ahead = due - time.perf_counter()
        if ahead > _SLICE:
            time.sleep(ahead)
        if mark is not None:
            sent.append((mark, time.perf_counter()))
        connections[rank].sendall(wire)
        due += 1 / rate
    return sent


def _queues(spec: FeedSpec, changes: Iterable[Change]) -> Queues:
    queues: Queues = [[] for _ in range(spec.ranks)]
    _extend(queues, spec, changes)
    return queues


def _extend(queues: Queues, spec: FeedSpec, changes: Iterable[Change]) -> None:
    for message in _encoded(spec, changes):
        queues[message.rank].append(message)


def _encoded(spec: FeedSpec, changes: Iterable[Change]) -> Iterator[Message]:
    return messages(
        changes,
        _Encoder(spec.worker_ranks),
        event_blocks=spec.event_blocks,
        batch_events=spec.batch_events,
    )


class _Encoder(MsgpackEncoder):
    """Names each rank's dp_rank within its worker."""

    def __init__(self, worker_ranks: int) -> None:
        super().__init__()
        self._worker_ranks = worker_ranks

    def encode(self, rank: int, pieces: Sequence[Piece]) -> bytes:
        return super().encode(rank % self._worker_ranks if self._worker_ranks else rank, pieces)


def _in_turn(queues: Queues, first_seqs: list[int]) -> list[tuple[Message, list[bytes]]]:
    """The messages of all ranks in turn, each with its frames."""
    return [
        (message, _parts(first_seqs[message.rank] + place, message))
        for place, turn in enumerate(zip_longest(*queues))
        for message in turn
        if message is not None
    ]


def _pace(
    sockets: list[zmq.Socket[bytes]], frames: list[tuple[Message, list[bytes]]], rate: float
) -> None:
    due = time.perf_counter()
    for message, parts in frames:
        ahead = due - time.perf_counter()
        if ahead > _SLICE:
            time.sleep(ahead)
        sockets[message.rank].send_multipart(parts)
        due += message.blocks / rate


def _parts(seq: int, message: Message) -> list[bytes]:
    return [b"", seq.to_bytes(8, "big"), message.data]


def _plain(prompts: list[Prompt]) -> list[Any]:
    return [[prompt.tokens.tolist(), list(prompt.depths.items())] for prompt in prompts]


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
