"""The server: one subscriber that keeps other processes' replicas."""

from __future__ import annotations

import atexit
import math
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kvindex.client import Client, ClientOptions
from kvindex.index.snapshot import require_native
from kvindex.replicas.meeting_point import Listener
from kvindex.replicas.outflow import Outflow, StreamTap
from kvindex.replicas.reception import Reception
from kvindex.replicas.serving import Serving
from kvindex.subscribe.discovery import Engines
from kvindex.wire.errors import ConfigurationError

if TYPE_CHECKING:  # no dependency: editors and type checkers have it
    from typing_extensions import Unpack


class FanOut(Serving):
    """Subscribes once, and lets any number of processes on this machine ask.

    Each of them calls `kvindex.replicas.join(path)`, at any time, and has a replica of the
    index from then on. Linux only.

    Args:
        workers: as for `kvindex.connect`.
        path: where to listen for processes that join: a socket that is made there, in a directory
            that others cannot write to, and goes when this is closed.
        patience: seconds in all for which a slow replica may block the subscriber's thread; they
            grow back at a tenth of the time that passes. A replica that would block it for longer
            is evicted, and joins anew by itself.
        max_replicas: most processes at a time.
        chunk_bytes, chunks: size of the ring in shared memory, which takes their product.
        options: as for `kvindex.connect`. Replicas keep to `max_blocks_per_rank`, too.

    Attributes:
        client: the client that it fills; it can be asked as well, and workers added and removed.
        path: where it listens.

    Raises:
        ConfigurationError: a value cannot work, a living server is at `path`, others could write
            there, or the index is the Python one.
        SegmentError: the shared memory cannot be made.
        OSError: the socket cannot be made.

    Thread safety: every method may be called from any thread.

    Examples:
        >>> import tempfile
        >>> from kvindex import Worker
        >>> from kvindex import replicas
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/kvindex.sock"
        ...     with replicas.FanOut([Worker("vllm-0", "tcp://127.0.0.1:5557")], path):
        ...         with replicas.join(path) as replica:  # in another process
        ...             print(replica.ranks, replica.match([1, 2, 3]).best)
        (Rank(worker='vllm-0', dp_rank=0),) None
    """

    def __init__(
        self,
        workers: Engines,
        path: str | os.PathLike[str],
        *,
        patience: float = 1.0,
        max_replicas: int = 64,
        chunk_bytes: int = 64 << 10,
        chunks: int = 256,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__()
        if not 0 < patience < math.inf:
            raise ConfigurationError(f"patience must be above 0 s, not {patience!r}")
        require_native()
        self.path = os.fspath(path)
        with ExitStack() as opened:  # closed again if something goes wrong
            listener = Listener(path)
            opened.callback(listener.close)
            self._outflow = Outflow(max_replicas, chunk_bytes, chunks, patience)
            opened.callback(self._outflow.close)
            self._tap = StreamTap(self._outflow, self._ended.set)
            self.client = Client(workers, tap=self._tap, on_stop=self._stopped, **options)
            opened.callback(self.client.close)
            self._reception = Reception(
                listener,
                self.client,
                self._tap,
                self._outflow,
                max_replicas,
                self._rest,
                self._fail,
            )
            opened.pop_all()
        # Before the finalizers of the ring, whose hook is older: its memory must not go while the
        # subscriber's thread sends. Not before the end: its threads keep this alive.
        atexit.register(self.close)

    def statistics(self) -> dict[str, Any]:
        """Return counters as plain JSON-ready values; those of `client` are its own.

        `replicas`, `joining`: processes now. `joined`, `left`, `died`, `evicted`: processes so far
        that joined, left, ended without leaving, and were removed for being slow. `turned_away`:
        connections that did not become replicas, by reason. `messages`, `bytes`, `chunks`: sent, to
        all at once; `entries`, `heartbeats`: in them. `blocked_seconds`: for which the sending
        thread waited for slow replicas. `sections_taken`: copies of ranks made for joiners;
        joiners at one time share them. `snapshots_begun_again`: because ranks were renamed.
        """
        return {**self._reception.statistics(), **self._counters()}

    def report(self) -> dict[str, Any]:
        """Return `statistics()` and those of `client` in one.

        `kvindex.replicas.ask(path)` returns the same in any other process.
        """
        return {**self._reception.statistics(), **self._rest()}

    def _rest(self) -> dict[str, Any]:
        return {**self._counters(), **self.client.statistics()}

    def _counters(self) -> dict[str, Any]:
        return {**self._outflow.statistics(), **self._tap.statistics()}

    def _close_parts(self) -> None:
        self._reception.close()
        self.client.close()
        self._outflow.close()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._ended.set()

    def __repr__(self) -> str:
        replicas = self._reception.statistics()["replicas"]
        return f"<FanOut at {self.path} to {replicas} replicas of {self.client!r}>"
