"""Publishers in this process, for what only sockets can feed."""

from __future__ import annotations

import zmq

_JOIN_MS = 30_000  # for which a subscriber is waited for


class Publishers:
    """A PUB socket for each rank, without a limit on what may queue: nothing is dropped.

    Args:
        ranks: how many.
    """

    def __init__(self, ranks: int) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * ranks + 16)
        self._sockets = [self._context.socket(zmq.XPUB) for _ in range(ranks)]
        self._seqs = [0] * ranks
        for publisher in self._sockets:
            publisher.linger = 0
            publisher.rcvtimeo = _JOIN_MS
            publisher.set_hwm(0)
            publisher.bind("tcp://127.0.0.1:*")

    @property
    def endpoints(self) -> list[str]:
        """Where each rank publishes."""
        return [one.getsockopt_string(zmq.LAST_ENDPOINT) for one in self._sockets]

    def wait_joined(self) -> None:
        """Return when every rank has its subscriber.

        Raises:
            zmq.Again: one has not come.
        """
        for publisher in self._sockets:
            publisher.recv()  # the subscription

    def send(self, rank: int, data: bytes) -> None:
        """Publish a rank's next batch."""
        seq = self._seqs[rank].to_bytes(8, "big")
        self._sockets[rank].send_multipart([b"", seq, data])
        self._seqs[rank] += 1

    def close(self) -> None:
        """Close the sockets."""
        for publisher in self._sockets:
            publisher.close()
        self._context.term()
