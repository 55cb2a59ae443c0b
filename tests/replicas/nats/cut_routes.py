"""A cluster whose servers reach each other through proxies, so that tests can part it."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvindex.testing.ports import reserve_port
from tests.nats_server import NatsServer, Routes

Pair = tuple[int, int]


class CutRoutes:
    """The routes between three servers, each from one server to another.

    While a server is cut off, what it and the others send each other waits, as packets do that a
    network loses: nobody's connection is closed.
    """

    def __init__(self, targets: list[int]) -> None:
        self.ports: dict[Pair, int] = {}
        self._targets = targets
        self._loop = asyncio.new_event_loop()
        self._gates = {
            pair: asyncio.Event() for pair in itertools.permutations(range(len(targets)), 2)
        }
        self._tasks: set[asyncio.Task[None]] = set()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    @contextmanager
    def cut_off(self, number: int) -> Iterator[None]:
        """Part a server from the others meanwhile."""
        self._set(number, is_open=False)
        try:
            yield
        finally:
            self._set(number, is_open=True)

    def close(self) -> None:
        """Close all connections."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _set(self, number: int, *, is_open: bool) -> None:
        def change() -> None:
            for pair, gate in self._gates.items():
                if number in pair:
                    (gate.set if is_open else gate.clear)()
            done.set()

        done = threading.Event()
        self._loop.call_soon_threadsafe(change)
        done.wait()

    def _run(self, ready: threading.Event) -> None:
        try:
            self._loop.run_until_complete(self._serve(ready))
        finally:
            self._loop.close()

    async def _serve(self, ready: threading.Event) -> None:
        self._end = asyncio.Event()
        servers = []
        for pair, gate in self._gates.items():
            gate.set()
            listener = socket.create_server(("127.0.0.1", 0))
            self.ports[pair] = listener.getsockname()[1]
            servers.append(await asyncio.start_server(self._accept(pair, gate), sock=listener))
        ready.set()
        await self._end.wait()
        for server in servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, pair: Pair, gate: asyncio.Event):  # type: ignore[no-untyped-def]
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with suppress(OSError, asyncio.CancelledError):
                await self._connect(self._targets[pair[1]], gate, reader, writer)

        return accept

    async def _connect(
        self,
        target: int,
        gate: asyncio.Event,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Forward both ways until a side closes."""
        ends = [writer]
        try:
            await gate.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
            ends.append(far_writer)
            ways = [
                asyncio.ensure_future(_forward(source, sink, gate))
                for source, sink in ((reader, far_writer), (far_reader, writer))
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            for end in ends:
                end.transport.abort()


async def _forward(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, gate: asyncio.Event
) -> None:
    while data := await source.read(1 << 16):
        await gate.wait()
        sink.write(data)
        await sink.drain()


@contextmanager
def cluster_that_can_be_cut(folder: Path) -> Iterator[tuple[list[NatsServer], CutRoutes]]:
    """Three servers that replicate streams, and the routes between them."""
    with ExitStack() as stack:
        own_ports = []
        for _ in range(4):
            holder, port = reserve_port()
            stack.enter_context(holder)
            own_ports.append(port)
        *listening, nowhere = own_ports
        routes = CutRoutes(listening)
        stack.callback(routes.close)
        servers = [
            stack.enter_context(
                NatsServer(
                    folder / f"n{number}",
                    name=f"n{number}",
                    routes=Routes(
                        own,
                        [routes.ports[number, other] for other in range(3) if other != number],
                        nowhere,  # or they would connect past the proxies
                    ),
                )
            )
            for number, own in enumerate(listening)
        ]
        for server in servers:
            server.wait_for_leader()
        yield servers, routes
