"""The simulated engines of `python -m benchmarks routing`, and what runs over them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.routing.cache import PrefixCache
from benchmarks.routing.engine import Engine, Job, Model, Progress, Stored, idle_ttft
from benchmarks.routing.field import POLICIES, make_policy
from benchmarks.routing.generated import KINDS, generate
from benchmarks.routing.pairs import Pairs, PairSimulation
from benchmarks.routing.payloads import payload
from benchmarks.routing.plots import Line, line_chart
from benchmarks.routing.runs import Fleet, Run, Traffic, simulate, spread
from benchmarks.routing.sharing import Boards
from benchmarks.routing.simulation import Clock, Loss, Request, Simulation
from benchmarks.routing.traces import agents, has_sessions, mooncake
from benchmarks.routing.traffic import BLOCK, Session, Turn, tokens_of
from kvindex import Index, Rank
from kvindex.routing import Load, Router

pytestmark = pytest.mark.unit

MODEL = Model(cache=256 * BLOCK)
NOT_WHOLE = 100  # tokens
LOSSES = [Loss(rank=0, at=1.5, notice=0.1, back=2.0), Loss(rank=1, at=4.0)]


def turn(prompt: int, output: int = 1, *, first: int = 1, gap: float = 0.0) -> Turn:
    """Return a turn whose blocks are named from `first` on."""
    return Turn(gap, prompt, output, tuple(range(first, first + (prompt + output) // BLOCK)))


def steps(engine: Engine) -> Iterator[tuple[float, Progress]]:
    """Yield the end and the results of each step until the engine is idle."""
    while engine.due is not None:
        yield engine.due, engine.advance()


def alone(prompt: Turn, engine: Engine, now: float = 0.0) -> tuple[Job, float, float]:
    """Have an idle engine serve one request; return the times of its first and last token, too."""
    engine.submit(job := Job(prompt, 0), now)
    first = last = math.nan
    for due, progress in steps(engine):
        first = due if progress.first else first
        last = due if progress.finished else last
    return job, first, last


def simulation(
    *,
    policy: str = "kvindex",
    gateways: int = 1,
    shared: float | None = 0.0,
    event_delay: float = 0.0,
) -> tuple[Simulation, list[Router], Index, Boards]:
    index, clock, boards = Index(seed=1), Clock(), Boards(gateways)
    routers = [
        Router(index, policy=make_policy(policy), loads=b, clock=clock, seed=1) for b in boards
    ]
    made = Simulation(index, routers, clock, ranks=3, model=MODEL, event_delay=event_delay)
    boards.share(made, delay=shared, period=None)
    return made, routers, index, boards


# An engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [1, BLOCK, 8_192, 8_193, 50_000])
def test_the_first_token_of_an_idle_engine_comes_when_the_formula_says(prompt: int) -> None:
    _, first, _ = alone(turn(prompt), Engine(MODEL))
    assert first == pytest.approx(idle_ttft(MODEL, prompt))


def test_a_prompt_that_was_served_before_is_found_but_for_its_last_token() -> None:
    engine = Engine(MODEL)
    _, first, last = alone(turn(4 * BLOCK), engine)
    job, again, _ = alone(turn(4 * BLOCK), engine, last)
    assert job.hit == 3 * BLOCK
    assert again - last == pytest.approx(idle_ttft(MODEL, 4 * BLOCK, 3 * BLOCK))
    assert again - last < first


def test_the_blocks_of_an_answer_are_found_by_the_next_turn() -> None:
    engine = Engine(MODEL)
    _, _, last = alone(turn(BLOCK, BLOCK + 1), engine)
    job, _, _ = alone(turn(3 * BLOCK), engine, last)
    assert job.hit == 2 * BLOCK


def test_each_token_of_an_answer_takes_a_step() -> None:
    _, first, last = alone(turn(BLOCK, 11), Engine(MODEL))
    assert last - first == pytest.approx(10 * MODEL.step(0, 1))


def test_a_prefill_slows_down_what_decodes_beside_it() -> None:
    engine = Engine(MODEL)
    engine.submit(long := Job(turn(BLOCK, 1_000), 0), 0.0)
    assert engine.due is not None
    engine.advance()
    begun, stretch = idle_ttft(MODEL, BLOCK), MODEL.step(0, 1)
    engine.submit(Job(turn(8_000, first=900), 1), begun + 2.5 * stretch)
    assert engine.due == pytest.approx(begun + 3 * stretch)  # the step that runs is not cut
    engine.advance()
    assert engine.due == pytest.approx(begun + 3 * stretch + MODEL.step(8_000, 1))
    ends = {job: due for due, progress in steps(engine) for job in progress.finished}
    assert ends[long] == pytest.approx(begun + 999 * stretch + 8_000 / MODEL.prefill_rate)


def test_a_chunk_is_shared_by_prompts_in_their_order() -> None:
    engine = Engine(MODEL)
    engine.submit(Job(turn(1_000), 0), 0.0)  # runs at once, by itself
    for number, prompt in enumerate((6_000, 6_000), 1):
        engine.submit(Job(turn(prompt, first=1_000 * number), number), 0.0)
    first = [[job.request for job in engine.advance().first] for _ in range(3)]
    assert first == [[0], [1], [2]]
    seconds = MODEL.step(1_000, 0) + MODEL.step(8_192, 0) + MODEL.step(12_000 - 8_192, 0)
    assert engine.busy == pytest.approx(seconds)


def test_no_more_sequences_run_than_allowed() -> None:
    engine = Engine(replace(MODEL, running=2))
    for number in range(5):
        engine.submit(Job(turn(BLOCK, 50, first=100 * number + 1), number), 0.0)
    finished: list[int] = []
    for _, progress in steps(engine):
        finished += [job.request for job in progress.finished]
        assert sum(job.left == 0 and job.own > 0 for job in engine.sequences) <= 2
    assert sorted(finished) == list(range(5))


def test_a_request_waits_for_memory() -> None:
    engine = Engine(MODEL)
    engine.submit(Job(turn(200 * BLOCK, BLOCK), 0), 0.0)
    engine.submit(Job(turn(100 * BLOCK, BLOCK, first=1_000), 1), 0.0)
    order: list[str] = []
    for _, progress in steps(engine):
        order += [f"{job.request} ends" for job in progress.finished]
        order += [f"{job.request} begins" for job in progress.first]
        assert engine.cache.used <= engine.cache.capacity
    assert order == ["0 begins", "0 ends", "1 begins", "1 ends"]


def test_the_cache_evicts_the_blocks_that_were_used_longest_ago_ends_first() -> None:
    cache = PrefixCache(4)
    assert cache.take([], 2)
    assert cache.store([1, 2]) == [1, 2]
    cache.release([1, 2], 0)
    assert cache.take([], 3)
    assert cache.evicted == [2]
    assert 1 in cache
    assert not cache.take([1], 1)  # four blocks, of which three are in use
    assert cache.used == 3


def test_a_block_that_is_removed_and_stored_in_one_step_is_resident() -> None:
    index, rank = Index(), Rank("engine")
    for removed, stored in (([], [1]), ([1], [1]), ([1], [])):
        progress = Progress([], [], removed, [Stored(None, stored)] if stored else [])
        message = payload(progress, 0.0)
        assert message is not None
        index.apply(rank, message)
        match = index.match(tokens_of(turn(BLOCK)))
        assert (match[rank].tokens if rank in match else 0) == BLOCK * len(stored)
    assert payload(Progress([], [], [], []), 0.0) is None


# A run --------------------------------------------------------------------------------------------


def sessions(kind: str = "chat", requests: int = 60) -> list[Session]:
    return generate(kind, requests=requests, seconds=3.0, seed=5)


def assert_idle(routers: list[Router]) -> None:
    assert {router.load(rank) for router in routers for rank in router.ranks} == {Load()}


def checked(requests: list[Request], made: list[Session]) -> None:
    """Each turn was answered once, in order, and hits are parts of prompts."""
    assert sorted(request.session for request in requests) == [
        (number, place)
        for number, session in enumerate(made)
        for place in range(len(session.turns))
    ]
    ends: dict[tuple[int, int], float] = {}
    for request in requests:
        assert request.first is not None
        assert request.finished is not None
        assert request.arrival < request.first <= request.finished
        assert 0 <= request.hit < request.turn.prompt
        number, place = request.session
        ends[number, place] = request.finished
        if place:
            assert request.arrival == pytest.approx(ends[number, place - 1] + request.turn.gap)


def assert_known(index: Index, run: Simulation, requests: list[Request]) -> None:
    """Each engine lives, and the index knows what it holds."""
    for turn in (request.turn for request in requests):
        match = index.match(tokens_of(turn), recomputed=1)
        for place in run.places:
            held = place.standing.cache.leading(turn.blocks[: (turn.prompt - 1) // BLOCK])
            assert (match[place.rank].tokens if place.rank in match else 0) == held * BLOCK


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_once_under_every_policy(policy: str) -> None:
    made = sessions()
    run, routers, _, _ = simulation(policy=policy)
    checked(run.run(made), made)
    statistics = routers[0].statistics()["bookings"]
    assert statistics["finished"] == sum(len(session.turns) for session in made)
    assert statistics["open"] == 0
    assert_idle(routers)


@pytest.mark.parametrize("event_delay", [0.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_the_index_holds_what_the_engines_hold(kind: str, event_delay: float) -> None:
    run, _, index, _ = simulation(event_delay=event_delay)
    run.lose(LOSSES)
    requests = run.run(sessions(kind))
    assert any(request.hit for request in requests)
    assert_known(index, run, requests)


def test_the_same_seed_gives_the_same_result_and_another_one_another() -> None:
    run = Run(Traffic("rag", 1.0, 60), "kvindex", 3, Fleet(ranks=2))
    assert simulate(run) == simulate(run)
    assert simulate(run) != simulate(replace(run, seed=4))


def test_requests_of_a_dead_engine_are_answered_elsewhere() -> None:
    made = sessions("bursts")
    run, routers, _, _ = simulation()
    run.lose(LOSSES)
    requests = run.run(made)
    checked(requests, made)
    again = sum(request.sent - 1 for request in requests)
    assert again > 0
    assert routers[0].statistics()["bookings"]["cancelled"] == again
    dead = [r for r in requests if r.rank == 0 and r.first and 1.5 < r.first < 3.5]
    assert all(request.sent > 1 for request in dead)
    assert not routers[0].drained


def test_events_that_come_late_make_predictions_worse_and_lose_nothing() -> None:
    made = Run(Traffic("chat", 2.0, 200), "kvindex", 1, Fleet(ranks=2))
    now, late = simulate(made), simulate(replace(made, fleet=Fleet(ranks=2, event_delay=5.0)))
    assert now.missed < late.missed


def test_gateways_that_share_all_bookings_choose_as_a_single_one_would() -> None:
    _, routers, _, _ = simulation(gateways=3)
    prompt = tokens_of(turn(4 * BLOCK))
    bookings = [router.reserve(prompt) for router in routers for _ in range(3)]
    assert {str(booking.rank) for booking in bookings} == {
        f"engine-{number:02}/0" for number in range(3)
    }
    loads = [[router.load(rank) for rank in router.ranks] for router in routers]
    assert loads[0] == loads[1] == loads[2]
    assert [load.open_requests for load in loads[0]] == [3, 3, 3]
    for booking in bookings:
        booking.cancel()
    assert_idle(routers)


def test_gateways_that_share_nothing_count_their_own_load_only() -> None:
    _, routers, _, _ = simulation(gateways=2, shared=None)
    booking = routers[0].reserve(tokens_of(turn(BLOCK)))
    assert routers[0].load(booking.rank).open_requests == 1
    routers[1].select(tokens_of(turn(BLOCK)))
    assert routers[1].load(booking.rank).open_requests == 0


def test_gateways_that_exchange_messages_choose_nearly_as_a_single_one_would() -> None:
    traffic = Traffic("rag", 1.0, 100)
    one, alone, sharing = (
        simulate(Run(traffic, "kvindex", 1, Fleet(ranks=3, **options)))
        for options in ({}, {"gateways": 4}, {"gateways": 4, "exchange": 0.005})
    )
    assert sharing.mean < alone.mean
    assert sharing.mean == pytest.approx(one.mean, rel=0.2)


# Prefill and decoding apart -----------------------------------------------------------------------

PAIRS = Pairs(prefill=1, local_tokens=2 * BLOCK)


def paired(pairs: Pairs = PAIRS) -> tuple[PairSimulation, list[Router], Index]:
    index, clock = Index(seed=1), Clock()
    routers = [Router(index, clock=clock, seed=1)]
    return PairSimulation(index, routers, clock, ranks=3, model=MODEL, pairs=pairs), routers, index


def test_what_is_prefilled_elsewhere_is_fetched_before_its_first_token() -> None:
    run, _, _ = paired()
    (request,) = run.run([Session(0.0, (turn(20 * BLOCK, 5),))])
    moved = PAIRS.hop + 20 * BLOCK / PAIRS.link
    prefilled = idle_ttft(MODEL, 20 * BLOCK)
    assert request.apart
    assert request.rank > 0
    assert request.first == pytest.approx(prefilled + moved + MODEL.step(1, 0))
    assert request.finished == pytest.approx((request.first or 0.0) + 4 * MODEL.step(0, 1))


def test_only_what_is_missing_is_fetched_and_little_is_prefilled_where_it_decodes() -> None:
    run, _, _ = paired()
    turns = [turn(length * BLOCK, gap=1.0) for length in (20, 22, 26)]
    whole, local, apart = run.run([Session(0.0, tuple(turns))])
    assert [whole.apart, local.apart, apart.apart] == [True, False, True]
    assert local.rank == apart.rank == whole.rank
    assert local.first == pytest.approx(local.arrival + idle_ttft(MODEL, 2 * BLOCK))
    assert local.hit == 20 * BLOCK
    # The one that prefills has not seen the second turn; the one that decodes has.
    assert apart.hit == apart.predicted == 20 * BLOCK
    prefilled = apart.arrival + idle_ttft(MODEL, 6 * BLOCK)
    moved = PAIRS.hop + 4 * BLOCK / PAIRS.link
    assert apart.first == pytest.approx(prefilled + moved + MODEL.step(1, 0))


def test_two_transfers_over_one_link_come_one_after_the_other() -> None:
    pairs = replace(PAIRS, prefill=2, link=BLOCK)  # a block a second
    run, _, _ = paired(pairs)
    made = [Session(0.0, (turn(10 * BLOCK, first=100 * number + 1),)) for number in range(2)]
    one, other = sorted(request.first or 0.0 for request in run.run(made))
    assert other - one == pytest.approx(10.0, abs=0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("local_tokens", [0, 512, math.inf])
def test_pairs_answer_every_request_and_keep_nothing_pinned(kind: str, local_tokens: float) -> None:
    made = sessions(kind)
    run, routers, index = paired(replace(PAIRS, local_tokens=local_tokens))
    requests = run.run(made)
    checked(requests, made)
    assert_idle(routers)
    assert any(request.apart for request in requests) == (local_tokens < math.inf)
    assert_known(index, run, requests)
    assert not any(place.standing.cache.used for place in run.places)


def test_what_waits_for_memory_begins_when_blocks_that_were_kept_are_released() -> None:
    engine = Engine(replace(MODEL, cache=10 * BLOCK))
    engine.submit(giver := Job(turn(8 * BLOCK), 0, gives=True), 0.0)
    engine.submit(Job(turn(8 * BLOCK, first=100), 1), 0.0)
    assert [len(progress.finished) for _, progress in steps(engine)] == [1]
    engine.release(giver, 5.0)
    assert engine.due == pytest.approx(5.0 + idle_ttft(MODEL, 8 * BLOCK))


def test_the_gaps_between_tokens_show_a_prefill_beside_them() -> None:
    engine = Engine(MODEL)
    engine.submit(Job(turn(BLOCK, 101), 0), 0.0)
    engine.advance()
    engine.submit(Job(turn(8_000, first=900), 1), 0.5)
    assert len(list(steps(engine))) == 3
    assert engine.gaps == {
        round(MODEL.step(0, 1), 4): 99,
        round(MODEL.step(8_000, 1), 4): 1,
        round(MODEL.step(BLOCK, 0), 4): 0,
    }


# Traffic and figures ------------------------------------------------------------------------------


def test_the_tokens_of_equal_beginnings_are_equal_and_no_longer() -> None:
    short, long = turn(2 * BLOCK + NOT_WHOLE), turn(3 * BLOCK)
    assert len(tokens_of(short)) == short.prompt
    assert tokens_of(short)[: 2 * BLOCK] == tokens_of(long)[: 2 * BLOCK]
    assert tokens_of(short)[2 * BLOCK :] != tokens_of(long)[2 * BLOCK : short.prompt]


@pytest.mark.parametrize("kind", KINDS)
def test_generated_turns_continue_their_session(kind: str) -> None:
    made = sessions(kind)
    assert made == sessions(kind)
    assert sum(len(session.turns) for session in made) >= 60
    for turns in (session.turns for session in made):
        for before, after in pairwise(turns):
            assert after.prompt > before.prompt + before.output
            assert after.blocks[: len(before.blocks)] == before.blocks
        assert all(len(t.blocks) == (t.prompt + t.output) // BLOCK for t in turns)


def test_a_trace_keeps_its_order_and_is_spread_over_its_grid(tmp_path: Path) -> None:
    rows = [
        {"timestamp": t, "input_length": 700, "output_length": 0, "hash_ids": [0, n]}
        for n, t in enumerate((0, 0, 0, 3_000, 3_000), 1)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = mooncake(file, speed=2.0, seed=1)
    starts = [session.start for session in made]
    assert starts == sorted(set(starts))
    assert starts[2] < 1.5 <= starts[3]
    assert starts[4] < 3.0
    assert [session.turns for session in made] == [(Turn(0.0, 700, 1, (1,)),)] * 5
    assert len(mooncake(file, speed=2.0, seed=1, most=2)) == 2


def test_agents_wait_share_a_prefix_and_have_sub_agents(tmp_path: Path) -> None:
    def request(t: float, think: float | None, *ids: int) -> dict[str, object]:
        blocks = sum(last - first + 1 for first, last in zip(ids[::2], ids[1::2], strict=True))
        return {"t": t, "in": 64 * blocks + 5, "out": 9, "think": think, "ids": ids}

    sub_agent = {
        "t": 5_000.0,
        "tool_tokens": 0,
        "system_tokens": 0,
        "requests": [request(0, 0, 31, 38)],
    }
    requests = [request(0, 0.0, 1, 17), request(9, None, 1, 16), request(4_900, 4_000.0, 18, 41)]
    row = {"tool_tokens": 500, "system_tokens": 100, "requests": [*requests, sub_agent]}
    file = tmp_path / "agents.jsonl"
    file.write_text(2 * (json.dumps(row) + "\n"))
    assert has_sessions(file)
    one, other = agents(file, seed=1)
    assert [turn.gap for turn in one.turns] == [0.0, 0.0, 300.0]
    assert [len(turn.blocks) for turn in one.turns] == [2, 2, 3]
    first, _, last = (turn.blocks for turn in one.turns)
    assert first == one.turns[1].blocks
    assert first[0] == other.turns[0].blocks[0]  # the 600 tokens that all such sessions have
    assert first[1] != other.turns[0].blocks[1]
    assert not set(last) & {*first, *other.turns[2].blocks}
    (branch,) = one.branches
    assert branch.start == pytest.approx(5_000 - 3_700)
    assert len(agents(file, seed=1, most=1)) == 1


def test_so_many_sessions_are_open_at_a_time() -> None:
    made = [
        Session(0.0, (turn(BLOCK, 300, first=20 * n), turn(BLOCK, 300, first=20 * n + 5, gap=1.0)))
        for n in range(6)
    ]
    made[0] = replace(made[0], branches=(Session(0.5, (turn(BLOCK, first=200),)),))
    run, _, _, _ = simulation()
    requests = run.run(made, at_once=2)
    assert len(requests) == 13
    spans = [
        (min(r.arrival for r in one), max(r.finished or 0.0 for r in one))
        for number in {request.session[0] for request in requests}
        if (one := [r for r in requests if r.session[0] == number and r.turn.blocks[0] < 200])
    ]
    assert max(sum(begin <= at < end for begin, end in spans) for at, _ in spans) == 2


def test_a_request_that_fits_nowhere_does_not_end_its_session() -> None:
    large = turn(MODEL.cache + 1)
    made = [Session(0.0, (large, turn(BLOCK)))]
    run, _, _, _ = simulation()
    assert len(run.run(made)) == 1
    assert run.refused == 1


def test_noise_is_the_half_width_of_the_interval_of_a_mean() -> None:
    far = spread([1.0, 2.0, 3.0])
    assert far.mean == 2.0
    assert far.noise == pytest.approx(4.30 / math.sqrt(3))
    assert not far.matters
    assert spread([4.0, 4.1, 4.0]).matters
    assert not spread([1e9]).matters


def test_a_chart_has_a_line_for_each_policy() -> None:
    chart = line_chart("waits <ms>", [Line("a", [(1, 10.0), (2, 900.0)]), Line("b", [(1, 20.0)])])
    assert chart.count("<path") == 3 + 1 + 2 + 2  # decades, axes, lines, legend
    assert "waits &lt;ms&gt;" in chart
