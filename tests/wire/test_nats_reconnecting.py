"""Connections leave servers that stand still, whatever is unsent, and leave nothing open."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvindex.wire import nats
from kvindex.wire.nats import NatsPool, open_connection, parse_pool
from tests.live import PATIENCE
from tests.nats_server import NatsServer

pytestmark = pytest.mark.faults


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NatsServer]]:
    """Two servers without a link between them; clients leave them soon."""
    monkeypatch.setattr(nats, "_PING_SECONDS", 0.2)
    monkeypatch.setattr(nats, "_CONNECT_SECONDS", 0.2)
    with (
        NatsServer(tmp_path / "a", jetstream=False) as first,
        NatsServer(tmp_path / "b", jetstream=False) as second,
    ):
        yield [first, second]


def pool_at(*servers: NatsServer) -> NatsPool:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return parse_pool(f"nats://{hosts}", "p", {})


async def connected_again(changes: asyncio.Queue[str]) -> None:
    while await asyncio.wait_for(changes.get(), PATIENCE):
        pass


async def test_fault_a_server_stands_still_and_a_client_with_much_unsent_moves_on(
    servers: list[NatsServer],
) -> None:
    changes: asyncio.Queue[str] = asyncio.Queue()
    client = await open_connection(
        pool_at(*servers), "test", timeout=PATIENCE, on_change=changes.put_nowait
    )
    assert client.connected_url is not None
    stopped = next(server for server in servers if server.port == client.connected_url.port)
    with stopped.stopped():
        for _ in range(32):
            await client.publish("a", bytes(1 << 20))
        await connected_again(changes)
        assert client.connected_url.port != stopped.port
    await client.close()


async def test_fault_attempts_that_no_server_answers_leave_no_socket_open(
    servers: list[NatsServer],
) -> None:
    first, second = servers
    changes: asyncio.Queue[str] = asyncio.Queue()
    client = await open_connection(
        pool_at(first), "test", timeout=PATIENCE, on_change=changes.put_nowait
    )
    client.set_server_pool([second.url, first.url])
    with second.stopped():
        first.kill()
        while "Timeout" not in await asyncio.wait_for(changes.get(), PATIENCE):
            pass
        first.start()
        await connected_again(changes)
    await client.close()
    gc.collect()  # what is open now is reported as a warning
