"""When a connection moves on to another server, since JetStream does not answer at this one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvindex.replicas.nats import log as log_module
from kvindex.replicas.nats.log import Log
from kvindex.wire.errors import NatsError
from kvindex.wire.nats import parse_pool

pytestmark = pytest.mark.unit

CALLS = ("stream_info", "get_msg", "subscribe")  # each needs more of a cluster than the one before


class Server:
    """A connection to a server that leaves some calls unanswered."""

    is_connected, is_closed, max_payload = True, False, 1 << 20

    def __init__(self, *unanswered: str) -> None:
        self.unanswered = unanswered

    def jetstream(self, **_: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        async def call(*_: Any, **__: Any) -> Any:
            if name in self.unanswered:
                from nats.js.errors import ServiceUnavailableError

                raise ServiceUnavailableError(code=503, err_code=10008, description="no leader")
            state = SimpleNamespace(messages=7, last_seq=7, first_seq=1)
            return SimpleNamespace(state=state, subject="", data=b"")

        return call


async def follow(log: Log) -> None:
    """Look at the end of the log and ask for it, as a replica does."""
    try:
        await log.head()
        await log.read(7)
    except NatsError:
        pass


@pytest.mark.parametrize("first", range(len(CALLS)))
async def test_whatever_a_cut_off_server_still_answers_the_connection_moves_on(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_SILENT_SECONDS", 0.0)
    client: Any = Server(*CALLS[first:])
    log = Log(client, parse_pool("nats://n", "p", {}))
    await follow(log)
    assert log.moves == 0
    await follow(log)
    assert log.moves == 1


async def test_a_connection_that_is_answered_again_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_SILENT_SECONDS", 0.0)
    client: Any = Server()
    log = Log(client, parse_pool("nats://n", "p", {}))
    for unanswered in (*CALLS, *CALLS):
        client.unanswered = (unanswered,)
        await follow(log)
        client.unanswered = ()
        await follow(log)
    assert log.moves == 0
