"""Each request's prediction beside the `cached_tokens` that a whole vLLM reports."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from kvindex import State, connect
from kvindex.routing import Router
from tests.engines.comparing import Compared, Fleet, Ledger
from tests.engines.vllm import BLOCK_SIZE, BLOCKS, LONGEST, PATIENCE, Vllm
from tests.engines.workload import Workload
from tests.live import until

pytestmark = pytest.mark.engine


def unequal(compared: Sequence[Compared]) -> list[Compared]:
    return [result for result in compared if result.verdict != "equal"]


def test_every_hit_is_as_predicted_under_eviction(fleet: Fleet, ledger: Ledger) -> None:
    """Chats as ids and as text, salts, repeats, clients that hang up, more than the cache holds."""
    compared = fleet.one_by_one(Workload(1), 160)
    ledger.note("one by one, with eviction", compared)
    assert unequal(compared) == []
    assert sum(result.cached for result in compared) > 10_000
    computed = sum(result.asked - result.cached for result in compared) // BLOCK_SIZE
    assert computed > 2 * len(fleet.places) * BLOCKS, "so blocks were evicted"


def test_after_requests_at_once_every_hit_is_as_predicted_again(
    fleet: Fleet, ledger: Ledger
) -> None:
    """While six run at once, caches change between question and schedule: that is only counted."""
    work = Workload(2)
    ledger.note("six at once", fleet.at_once(work, 120))
    compared = fleet.one_by_one(work, 40)
    ledger.note("one by one, after that", compared)
    assert unequal(compared) == []


@pytest.mark.parametrize(
    "option", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}], ids=["prompt", "echo"]
)
def test_a_request_for_the_prompts_logprobs_reads_no_cache(
    fleet: Fleet, option: dict[str, Any]
) -> None:
    rank, engine = fleet.places[0]
    prompt = Workload(3).tokens(300)
    body = {"prompt": prompt, "max_tokens": 1}
    engine.complete(body)
    fleet.catch_up(Workload(4))
    assert fleet.client.match(prompt, recomputed=1)[rank].tokens == 288
    usage = engine.complete(body | option)["usage"]
    assert not (usage["prompt_tokens_details"] or {}).get("cached_tokens")


def test_the_hit_of_several_answers_to_one_prompt_is_the_last_ones(fleet: Fleet) -> None:
    """With n=2, vLLM reports what the second sibling found: the first one's blocks."""
    body = {"prompt": Workload(5).tokens(300), "max_tokens": 1, "n": 2, "temperature": 1.0}
    usage = fleet.places[0][1].complete(body)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 288


def test_a_reset_cache_is_empty_once_the_engine_steps_again(fleet: Fleet, ledger: Ledger) -> None:
    work = Workload(6)
    compared = fleet.one_by_one(work, 10)
    for _, engine in fleet.places:
        engine.reset_prefix_cache()
    compared += fleet.one_by_one(work, 30)  # a step of each engine comes before each question
    ledger.note("around /reset_prefix_cache", compared)
    assert unequal(compared) == []


def test_a_subscriber_that_joins_late_predicts_as_well(pair: list[Vllm], ledger: Ledger) -> None:
    with connect([engine.url for engine in pair]) as client:
        late = Fleet(client, pair)
        assert all(client.status(rank).complete for rank, _ in late.places)
        compared = late.one_by_one(Workload(7), 30)
    ledger.note("joined late", compared)
    assert unequal(compared) == []


def test_a_client_that_resumes_from_a_file_predicts_as_well(
    pair: list[Vllm], tmp_path: Path, ledger: Ledger
) -> None:
    work, urls = Workload(8), [engine.url for engine in pair]
    with connect(urls) as first:
        Fleet(first, pair).one_by_one(work, 10)
        first.save(tmp_path / "saved")
    with connect(urls) as meanwhile:
        Fleet(meanwhile, pair).one_by_one(work, 10)
    with connect(urls, resume=tmp_path / "saved") as resumed:
        fleet = Fleet(resumed, pair)
        for rank, _ in fleet.places:
            assert resumed.status(rank).counters["resumed"] == 1
        compared = fleet.one_by_one(work, 30)
    ledger.note("resumed from a file", compared)
    assert unequal(compared) == []


def test_routing_beats_round_robin_by_the_engines_own_counters(pair: list[Vllm]) -> None:
    rates = {}
    for policy in ("round-robin", "kvindex"):
        with connect([engine.url for engine in pair]) as client:
            fleet = Fleet(client, pair)
            for engine in pair:
                engine.reset_prefix_cache()
            fleet.catch_up(Workload(9))
            before = [engine.prefix_cache() for engine in pair]
            route_chats(fleet, Router(client, policy=policy))
            after = [engine.prefix_cache() for engine in pair]
        asked, hit = (
            sum(now[i] - then[i] for now, then in zip(after, before, strict=True)) for i in (0, 1)
        )
        rates[policy] = hit / asked
    print("hit rates by the engines' own counters:", rates)
    assert rates["kvindex"] > rates["round-robin"]


def route_chats(fleet: Fleet, router: Router) -> None:
    """Route 24 chats on 4 system prompts, six at a time, 200 requests in all."""
    engine_of, work, rng, lock = dict(fleet.places), Workload(10), random.Random(10), Lock()
    systems = [work.tokens(length) for length in (300, 300, 200, 160)]
    idle = [list(rng.choice(systems)) for _ in range(24)]

    def result(_: int) -> None:
        with lock:
            chat = idle.pop(rng.randrange(len(idle)))
            chat += work.tokens(rng.randint(10, 90))
            if len(chat) > LONGEST - 100:
                chat[:] = [*rng.choice(systems), *work.tokens(40)]
        with router.reserve(chat) as booking:
            body = {"prompt": chat, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
            answer = engine_of[booking.rank].complete(body)
            booking.first_token()
        with lock:
            chat += answer["choices"][0]["token_ids"]
            idle.append(chat)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(result, range(200)))


def test_the_doctor_finds_nothing_wrong(pair: list[Vllm]) -> None:
    command = [sys.executable, "-m", "kvindex", "doctor", *(engine.url for engine in pair)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_engine_that_is_killed_and_started_again_begins_anew(
    fleet: Fleet, ledger: Ledger
) -> None:
    work = Workload(11)
    fleet.one_by_one(work, 10)
    rank, engine = fleet.places[0]
    engine.kill()
    until(lambda: not fleet.client.status(rank).connected)
    assert fleet.client.match(work.tokens(64))[rank].state != State.LIVE
    engine.start()
    engine.wait_until_ready()
    fleet.client.wait_live(timeout=PATIENCE)
    compared = fleet.one_by_one(work, 40)
    ledger.note("after kill -9 and a new start", compared)
    status = fleet.client.status(rank)
    assert (status.epoch, status.restarts, status.complete) == (1, 1, True)
    assert unequal(compared) == []


def test_other_shapes_of_engines_hit_as_predicted(
    other: Vllm, ledger: Ledger, request: pytest.FixtureRequest
) -> None:
    """A hybrid of full attention and sliding windows; two DP ranks behind one port."""
    with connect(other.url) as client:
        fleet = Fleet(client, [other])
        assert len(fleet.places) == other.dp
        compared = fleet.one_by_one(Workload(12), 80)
    ledger.note(request.node.callspec.id, compared)
    assert unequal(compared) == []
    assert sum(result.cached for result in compared) > 2_000
