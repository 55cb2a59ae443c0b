"""Bodies sent to HTTP servers: answered as questions are, within the same bounds."""

from __future__ import annotations

import pytest

from kvindex.testing import FakeEngine, HttpEngine, HttpOptions
from kvindex.wire.errors import DiscoveryError
from kvindex.wire.web import Web
from tests.live import PATIENCE

pytestmark = pytest.mark.unit


def test_a_body_its_headers_and_the_token_reach_the_server() -> None:
    ranks = [FakeEngine(dp_rank=rank, block_size=4, publish=False) for rank in (0, 1)]
    with HttpEngine(ranks, options=HttpOptions(api_key="k")) as server:
        web = Web(server.url, token="k")
        body = b'{"prompt": [1, 2, 3, 4, 5], "max_tokens": 1}'
        rank = {"X-data-parallel-rank": "1"}
        assert web.post("/v1/completions", body, PATIENCE, headers=rank).status == 200
        assert [engine.hit([1, 2, 3, 4, 5]) for engine in ranks] == [0, 4]
        assert Web(server.url).post("/v1/completions", body, PATIENCE).status == 401


def test_an_answer_above_the_limit_is_refused() -> None:
    with FakeEngine(publish=False) as engine, HttpEngine(engine) as server:
        with pytest.raises(DiscoveryError, match="more than 10 bytes"):
            Web(server.url).post("/tokenize", b'{"prompt": "x"}', PATIENCE, limit=10)
