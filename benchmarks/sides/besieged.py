"""kvindex behind its sockets, with a healthy engine and a hostile one."""

from __future__ import annotations

from time import perf_counter, perf_counter_ns, sleep
from typing import Any

import msgspec
import zmq

from kvindex import Client, Rank, Worker, connect

_PAUSE = 0.001  # seconds between matches
_TIMEOUT = 30.0  # seconds for which a healthy batch is waited for
_HEALTHY = Rank("healthy")
_BLOCKS = 64  # of a healthy batch, of 16 tokens each


class Besieged:
    """A client of two engines, of which this process is the healthy one."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._seq = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)

    def connect(self, endpoint: str) -> None:
        """Subscribe to the hostile engine and to our own."""
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        workers = [Worker("hostile", endpoint), Worker("healthy", f"tcp://127.0.0.1:{port}")]
        self._client = connect(workers)
        self._socket.recv()  # the subscription
        self._client.wait_live(_TIMEOUT, ranks=[_HEALTHY])

    def measure(self, seconds: float) -> dict[str, Any]:
        """Return the ns that healthy batches took until they could be matched, and each match."""
        assert self._client is not None
        applied: list[int] = []
        matches: list[int] = []
        until = perf_counter() + seconds
        while perf_counter() < until:
            prompt = self._publish()
            sent = perf_counter_ns()
            while True:
                started = perf_counter_ns()
                match = self._client.match(prompt)
                ended = perf_counter_ns()
                matches.append(ended - started)
                if _HEALTHY in match and match[_HEALTHY].blocks == _BLOCKS:
                    break
                if ended - sent > _TIMEOUT * 1e9:
                    raise TimeoutError(f"a healthy batch was not applied: {self._client!r}")
                sleep(_PAUSE)
            applied.append(ended - sent)
        return {"applied": applied, "matches": matches}

    def close(self) -> None:
        """Unsubscribe."""
        assert self._client is not None
        self._client.close()
        self._socket.close()

    def _publish(self) -> list[int]:
        """Send one healthy batch; return the prompt that it stores."""
        first = self._seq * _BLOCKS
        prompt = list(range(first * 16, (first + _BLOCKS) * 16))
        labels = list(range(first + 1, first + _BLOCKS + 1))
        stored = ["BlockStored", labels, None, prompt, 16]
        payload = msgspec.msgpack.encode([1.0, [stored], None])
        self._socket.send_multipart([b"", self._seq.to_bytes(8, "big"), payload])
        self._seq += 1
        return prompt
