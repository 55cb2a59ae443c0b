"""Queries by the hash of blocks, beside queries by their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import xxhash

from kvindex import BlockStored
from kvindex.service.app import app_routes
from kvindex.service.hashing import HashFollower, HashQueries, hashed, packed_hashes
from kvindex.service.http.messages import Route
from kvindex.service.registry import Registry
from kvindex.service.service import Service
from kvindex.testing import FakeEngine, Workload
from tests.live import PATIENCE, caught_up, client_of
from tests.service.http.in_process import Asker, body_of

pytestmark = pytest.mark.service

SIZE = 16


def local(tokens: list[int]) -> list[int]:
    """The hash of each whole block, as Dynamo's clients compute and send it."""
    hashes = []
    for at in range(0, len(tokens) - SIZE + 1, SIZE):
        data = b"".join(token.to_bytes(4, "little") for token in tokens[at : at + SIZE])
        number = xxhash.xxh3_64_intdigest(data, seed=1337)
        hashes.append(number - 2**64 if number >= 2**63 else number)
    return hashes


def test_hashes_and_tokens_of_any_traffic_get_the_same_answer() -> None:
    follower = HashFollower()
    with FakeEngine("1", num_blocks=300) as engine, client_of() as client:
        registry = Registry(client, besides=[follower.subscriber])
        by_hash = HashQueries(registry, follower)
        ask = Asker(app_routes(Service(client, registry), by_hash=by_hash))
        assert ask.post("/register", body_of(engine))[0] == 201
        workload = Workload(60, seed=3)
        engine.run(workload)
        caught_up(client, engine)
        last = engine.published - 1
        assert follower.subscriber.wait_for(lambda all_: all_[engine.rank].seq == last, PATIENCE)
        hits = 0
        for request in list(workload)[::5]:
            tokens = list(request.token_ids)
            by_tokens = ask.post("/query", {"model_name": "m", "token_ids": tokens})
            same = ask.post("/query_by_hash", {"model_name": "m", "block_hashes": local(tokens)})
            assert stripped(same) == stripped(by_tokens)
            hits += bool(by_tokens[1]["scores"])
        assert hits > 3
        ask.post("/unregister", {"instance_id": 1, "model_name": "m"})
        assert follower.subscriber.ranks == client.ranks
        follower.close()


def stripped(answer: tuple[int, Any]) -> Any:
    return answer[0], answer[1]["scores"]


def test_a_server_without_hashes_says_how_to_get_them() -> None:
    with client_of() as client:
        asker = Asker(app_routes(Service(client)))
        status, body = asker.post("/query_by_hash", {"model_name": "m", "block_hashes": []})
        assert status == 501
        assert "--hash-queries xxh3" in body["error"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model": "m", "seq_hashes": [1]}', 501),  # rolling hashes
        (b'{"model_name": "m", "block_hashes": [9223372036854775808]}', 422),
        (b"[1, what", 422),
        (b"what", 400),
        (b'{"model_name": "m", "block_hashes": [1], "cache_salt": "s"}', 400),
        (b'{"model_name": "nope", "block_hashes": [1]}', 404),
    ],
)
def test_a_query_by_hash_that_cannot_be_answered_says_why(body: bytes, status: int) -> None:
    follower = HashFollower()
    with client_of() as client:
        by_hash = HashQueries(Registry(client), follower)
        for kind, code in (("application/json", status), (None, 415)):
            route = Route("POST", "/query_by_hash", by_hash.answer)
            headers = {} if kind is None else {"content-type": kind}
            answer = Asker([route]).send("POST", "/query_by_hash", content=body, headers=headers)
            assert answer.status_code == code
        follower.close()


def stored(tokens: list[Any], size: int = 4, **fields: Any) -> BlockStored:
    blocks = max(1, len(tokens) // size)
    labels: list[int | bytes] = list(range(blocks))
    return BlockStored(block_hashes=labels, token_ids=tokens, block_size=size, **fields)


def test_a_block_becomes_the_two_halves_of_its_hash() -> None:
    event = hashed(stored([1, 2, 3, 4, 5, 6, 7, 8]))
    assert event is not None
    digests = [
        xxhash.xxh3_64_intdigest(b"".join(t.to_bytes(4, "little") for t in block), seed=1337)
        for block in ([1, 2, 3, 4], [5, 6, 7, 8])
    ]
    halves = [half for number in digests for half in (number % 2**32, number >> 32)]
    assert event.token_ids == halves == packed_hashes(digests).tolist()
    assert event.block_size == 2


@pytest.mark.parametrize("tokens", [[1, 2, 3], list("abcd"), [1, 2, 3, -4], [1, 2, 3, 2**32]])
def test_tokens_that_cannot_be_hashed_are_left_out(tokens: list[Any]) -> None:
    assert hashed(stored(tokens)) is None


def test_an_event_that_only_tells_a_new_place_keeps_its_blocks() -> None:
    event = hashed(stored([], medium="CPU"))
    assert event is not None
    assert (event.token_ids, event.block_size, event.medium) == ([], 2, "CPU")
