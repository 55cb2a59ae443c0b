"""The log on a real server: appends that name what they follow, reads, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvindex import ConfigurationError
from kvindex.replicas.nats import log as log_module
from kvindex.replicas.nats.log import (
    AppendRefusedError,
    Head,
    Log,
    LogMessage,
    LogReader,
    NoStreamError,
    StreamSettings,
)
from kvindex.wire.errors import NatsError
from kvindex.wire.nats import NatsPool, parse_pool
from tests.live import PATIENCE
from tests.nats_server import NatsServer
from tests.replicas.nats.scenes import connection

pytestmark = pytest.mark.e2e

SMALL = StreamSettings(max_bytes=8 << 20)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine is no failure."""
    monkeypatch.setattr(log_module, "_API_SECONDS", PATIENCE)


@asynccontextmanager
async def opened(pool: NatsPool) -> AsyncIterator[Log]:
    """The log of a pool, not made yet."""
    async with connection(pool) as client:
        yield Log(client, pool)


@asynccontextmanager
async def made(pool: NatsPool) -> AsyncIterator[Log]:
    """The log of a pool, empty."""
    async with opened(pool) as log:
        await log.make(SMALL)
        yield log


async def filled(log: Log, count: int, epoch: str = "a-1") -> None:
    for number in range(count):
        assert await log.append(epoch, number, b"%d" % number) == number + 1


async def received(reader: LogReader, count: int) -> list[tuple[int, str, bytes]]:
    messages = [await reader.next(PATIENCE) for _ in range(count)]
    return [(message.seq, message.epoch, message.body) for message in messages]


def streams(log: Log) -> Any:
    """The stream as anybody else may change it."""
    return log._stream


# Heads and appends ------------------------------------------------------------------------------


async def test_a_log_that_is_new_has_no_messages(pool: NatsPool) -> None:
    async with opened(pool) as log:
        with pytest.raises(NoStreamError, match=str(pool)):
            await log.head()
        with pytest.raises(NoStreamError):
            await log.append("a-1", 0, b"")
        with pytest.raises(NoStreamError):
            await log.read(1)
        await log.make(SMALL)
        assert await log.head() == Head(0, 0, None)
        assert log.max_body_bytes > 7 << 20


async def test_appends_get_the_numbers_that_they_expect(pool: NatsPool) -> None:
    async with made(pool) as log:
        await filled(log, 3)
        assert await log.append("b-1", 3, b"") == 4
        assert await log.head() == Head(4, 1, "b-1")


async def test_an_append_that_expects_another_number_is_refused_and_stores_nothing(
    pool: NatsPool,
) -> None:
    async with made(pool) as log:
        await filled(log, 2)
        for expected in (0, 1, 3, 1000):
            with pytest.raises(AppendRefusedError, match="10071"):
                await log.append("a-1", expected, b"again")
        assert await log.head() == Head(2, 1, "a-1", b"1")


async def test_two_writers_cannot_get_one_number(pool: NatsPool) -> None:
    async with opened(pool) as first, opened(pool) as second:
        await first.make(SMALL)
        await second.make(SMALL)
        for number in range(20):
            done = await asyncio.gather(
                first.append("a-1", number, b"a"),
                second.append("b-1", number, b"b"),
                return_exceptions=True,
            )
            assert sorted(type(result).__name__ for result in done) == ["AppendRefusedError", "int"]
        assert (await first.head()).seq == 20


async def test_a_body_may_have_as_many_bytes_as_the_log_allows(pool: NatsPool) -> None:
    async with opened(pool) as log:
        await log.make(StreamSettings(max_bytes=64 << 20))
        assert await log.append("a-1", 0, bytes(log.max_body_bytes)) == 1
        with pytest.raises(NatsError, match="MaxPayloadError"):
            await log.append("a-1", 1, bytes(log.max_body_bytes + 1025))


async def test_a_foreign_message_shows_in_the_head(pool: NatsPool) -> None:
    async with made(pool) as log:
        await filled(log, 2)
        await streams(log).publish(f"{pool.log_prefix}nonsense", b"x", headers={"A": "b"})
        assert await log.head() == Head(3, 1, "nonsense", b"x")
        reader = await log.read(3)
        assert await received(reader, 1) == [(3, "nonsense", b"x")]
        await reader.close()
        with pytest.raises(AppendRefusedError):
            await log.append("a-1", 2, b"next")


async def test_a_purged_log_keeps_its_numbers(pool: NatsPool) -> None:
    async with made(pool) as log:
        await filled(log, 3)
        await streams(log).delete_msg(pool.stream, 3)
        assert await log.head() == Head(3, 1, None)
        await streams(log).purge_stream(pool.stream)
        assert await log.head() == Head(3, 4, None)
        with pytest.raises(AppendRefusedError):  # the epoch's messages are gone
            await log.append("a-1", 3, b"next")
        assert await log.append("a-2", 3, b"") == 4


async def test_a_deleted_log_is_missing_and_begins_again_at_1(pool: NatsPool) -> None:
    async with made(pool) as log:
        await filled(log, 3)
        await streams(log).delete_stream(pool.stream)
        with pytest.raises(NoStreamError):
            await log.head()
        with pytest.raises(NoStreamError):
            await log.append("a-1", 3, b"next")
        await log.make(SMALL)
        with pytest.raises(AppendRefusedError):
            await log.append("a-1", 3, b"next")
        assert await log.append("a-2", 0, b"") == 1


async def test_a_full_log_drops_its_oldest_messages(pool: NatsPool) -> None:
    async with made(pool) as log:
        for number in range(12):
            await log.append("a-1", number, bytes(1 << 20))
        head = await log.head()
        assert (head.seq, head.epoch) == (12, "a-1")
        assert 1 < head.first_seq < 12
        reader = await log.read(1)
        assert (await reader.next(PATIENCE)).seq == head.first_seq
        await reader.close()


# Reading ----------------------------------------------------------------------------------------


async def test_a_reader_gets_all_messages_from_its_number_on(pool: NatsPool) -> None:
    async with made(pool) as log:
        await filled(log, 3)
        await log.append("b-1", 3, b"")
        reader = await log.read(2)
        messages = [await reader.next(PATIENCE) for _ in range(3)]
        assert messages == [
            LogMessage(2, "a-1", 2, b"1"),
            LogMessage(3, "a-1", 1, b"2"),
            LogMessage(4, "b-1", 0, b""),
        ]
        with pytest.raises(asyncio.TimeoutError):
            await reader.next(0.01)
        await log.append("b-1", 4, b"later")
        assert await received(reader, 1) == [(5, "b-1", b"later")]
        await reader.close()


async def test_a_reader_of_a_number_to_come_waits_for_it(pool: NatsPool) -> None:
    async with made(pool) as log:
        reader = await log.read(3)
        await filled(log, 4)
        assert await received(reader, 2) == [(3, "a-1", b"2"), (4, "a-1", b"3")]
        await reader.close()


async def test_a_reader_sees_that_messages_are_gone_by_the_next_number(pool: NatsPool) -> None:
    async with made(pool) as log:
        await filled(log, 5)
        await streams(log).purge_stream(pool.stream, seq=4)
        reader = await log.read(2)
        assert (await reader.next(PATIENCE)).seq == 4
        await reader.close()


async def test_a_reader_may_be_closed_after_its_connection(pool: NatsPool) -> None:
    async with made(pool) as log:
        reader = await log.read(1)
    with pytest.raises(NatsError):
        await reader.next(PATIENCE)
    await reader.close()


# A server that is gone --------------------------------------------------------------------------


async def test_a_server_that_stands_still_is_no_answer_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NatsServer(tmp_path) as server:
        async with opened(parse_pool(server.url, "still", {})) as log:
            await log.make(SMALL)
        monkeypatch.setattr(log_module, "_API_SECONDS", 0.2)
        async with opened(parse_pool(server.url, "still", {})) as log:
            with server.stopped():
                with pytest.raises(NatsError, match=r"/still: TimeoutError"):
                    await log.append("a-1", 0, b"")


# Streams, servers and accounts that cannot work -------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"subjects": ["kvindex.{}.log.a"]}, "its subjects are "),
        ({"subjects": ["kvindex.{}.>"]}, "its subjects are "),
        ({"discard": "new"}, "refuses messages when it is full"),
        ({"retention": "workqueue"}, "does not retain messages by limits"),
    ],
    ids=["other subjects", "more subjects", "discard=new", "workqueue"],
)
async def test_a_stream_that_cannot_be_a_log_is_refused(
    pool: NatsPool, changed: dict[str, Any], reason: str
) -> None:
    from nats.js import api

    options = {"subjects": [pool.log_subjects], "max_bytes": 1 << 20, **changed}
    options["subjects"] = [subject.format(pool.name) for subject in options["subjects"]]
    async with opened(pool) as log:
        await streams(log).add_stream(api.StreamConfig(name=pool.stream, **options))
        with pytest.raises(ConfigurationError, match=f"{pool.stream} exists, but .*{reason}"):
            await log.make(SMALL)


async def test_a_stream_and_a_bucket_that_exist_are_used_as_they_are(pool: NatsPool) -> None:
    async with made(pool) as log:
        await filled(log, 2)
        await log.make(StreamSettings(max_bytes=16 << 20, store="file"))
        assert (await streams(log).stream_info(pool.stream)).config.max_bytes == 8 << 20
        assert await log.head() == Head(2, 1, "a-1", b"1")


async def test_another_stream_with_the_subjects_is_refused(pool: NatsPool) -> None:
    async with opened(pool) as log:
        await streams(log).add_stream(name=f"OTHER_{pool.name}", subjects=[pool.log_subjects])
        with pytest.raises(NatsError, match="subjects overlap"):
            await log.make(SMALL)


ACCOUNTS = """
accounts {
  SMALL { users: [{ user: small, password: x }], jetstream { max_mem: 4MB, max_file: 4MB } }
  FEW { users: [{ user: few, password: x }], jetstream { max_mem: 64MB, max_streams: 1 } }
  NONE { users: [{ user: none, password: x }] }
}
"""


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server whose accounts have limits."""
    with NatsServer(tmp_path_factory.mktemp("nats"), extra_config=ACCOUNTS) as server:
        yield server


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ("small", "raise max_mem of the server or the account, or lower max_bytes"),
        ("few", "raise max_streams"),
        ("none", "enable JetStream"),
    ],
)
async def test_an_account_whose_limits_are_too_small_is_an_error_with_what_to_do(
    limited: NatsServer, user: str, message: str
) -> None:
    pool = parse_pool(limited.url, "llama", {"user": user, "password": "x"})
    async with opened(pool) as log:
        with pytest.raises(NatsError, match=message):
            await log.make(SMALL)


async def test_three_replicas_need_three_servers(pool: NatsPool) -> None:
    async with opened(pool) as log:
        with pytest.raises(NatsError, match="start a cluster, or set replicas to 1"):
            await log.make(StreamSettings(replicas=3, max_bytes=8 << 20))


async def test_a_server_without_jetstream_is_an_error_with_what_to_do(tmp_path: Path) -> None:
    with NatsServer(tmp_path, jetstream=False) as server:
        async with opened(parse_pool(server.url, "llama", {})) as log:
            for call in (partial(log.make, SMALL), log.head, partial(log.read, 1)):
                with pytest.raises(NatsError, match="enable JetStream"):
                    await call()
            with pytest.raises(NoStreamError):
                await log.append("a-1", 0, b"")


async def test_a_server_whose_messages_are_too_small_is_refused(tmp_path: Path) -> None:
    with NatsServer(tmp_path, max_payload="32KB") as server:
        async with opened(parse_pool(server.url, "llama", {})) as log:
            with pytest.raises(ConfigurationError, match="set it to 1MB"):
                await log.make(SMALL)
