"""Property: however the bytes of requests are cut, their answers are the same, in order."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.http.scenes import Transport, connection_on, post

pytestmark = pytest.mark.property

CHUNKED = b"transfer-encoding: chunked"
REQUESTS = [
    post(b"/query", body=b"abc"),
    post(b"/query?a=1", b"content-type: x/y"),
    post(b"/later", body=b"abcd"),
    post(b"/query", CHUNKED) + b"3\r\nabc\r\n2\r\nde\r\n0\r\ntrailer: x\r\n\r\n",
    post(b"/query", b"upgrade: h2c", b"connection: upgrade", body=b"abc"),
    post(b"/query", b"expect: 100-continue", b"content-length: 1") + b"a",
    b"GET /query HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /pieces HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"HEAD /pieces HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"POST /query HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 2\r\n\r\nab",
]
TURNS = 100  # of the event loop, in which all is answered


async def answers(parts: list[bytes], turns: int) -> bytes:
    """Return what a connection writes, without what depends on time."""
    transport = Transport()
    connection = connection_on(transport)
    for part in parts:
        connection.data_received(part)
        for _ in range(turns):
            await asyncio.sleep(0)
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert not transport.closed
    assert not transport.paused
    written = b"".join(transport.written).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    return re.sub(rb"date: [^\r]*\r\n", b"", written)


@given(
    requests=st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
    turns=st.integers(0, 3),
)
def test_the_answers_do_not_depend_on_where_the_bytes_are_cut(
    requests: list[bytes], cuts: list[int], turns: int
) -> None:
    sent = b"".join(requests)
    bounds = sorted({0, len(sent), *(cut % len(sent) for cut in cuts)})
    parts = [sent[begin:end] for begin, end in pairwise(bounds)]
    alone = [asyncio.run(answers([request], 0)) for request in requests]
    assert asyncio.run(answers(parts, turns)) == b"".join(alone)
