"""Prefill and decode apart: P prefills, D fetches and answers, and no failure costs a request."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvindex import Rank
from kvindex.gateway import pairs
from kvindex.gateway.calls import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    read_call,
)
from kvindex.gateway.front import makers_of
from kvindex.gateway.pairs import params_of, single_token, unfit
from kvindex.gateway.routing import NoRankError
from kvindex.routing import Capacity, Ejection, Load
from tests.gateway.fronts import STREAM, Engine, Fronted, Hang, fronted
from tests.gateway.lives import DONE, JSON, ROLE, USAGE_FIELDS, WHOLE, event
from tests.gateway.test_models import Fleet, report
from tests.routing.fleet import PROMPT, Clock, hold

pytestmark = pytest.mark.unit

CHATS: dict[str, Any] = {"messages": [{"role": "user", "content": "Once"}]}
P, P2, P3 = Rank("p0"), Rank("p1"), Rank("p2")
D, D2 = Rank("e0"), Rank("e1")
PARAMS = b'{"remote_block_ids": [[1, 2]], "unknown": 1.0}'  # word for word, and what is new too
PREFILLED = b'{"id": "x", "kv_transfer_params": %b, %b}' % (PARAMS, USAGE_FIELDS)
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


# What P and D receive -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "limits", "single"),
    [
        (CHAT, {"max_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1}),
        (
            CHAT,
            {"max_completion_tokens": 9, "min_tokens": 3},
            {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0},
        ),
        (COMPLETIONS, {}, {"max_tokens": 1}),
        (MESSAGES, {"max_tokens": 9}, {"max_tokens": 1}),
        (RESPONSES, {"max_output_tokens": 9}, {"max_output_tokens": 1, "store": False}),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_p_is_asked_for_one_token_of_the_same_request(
    path: str, limits: dict[str, Any], single: dict[str, Any], is_stream: bool
) -> None:
    prompts = {COMPLETIONS: {"prompt": "Once"}, RESPONSES: {"input": "Once"}}
    own = {"model": "m", "seed": 2**70, **prompts.get(path, CHATS), **limits}
    body = json.dumps({**own, **({"stream": True} if is_stream else {})}).encode()
    asked = json.loads(single_token(read_call(path, body)))
    options = {"stream_options": None} if is_stream else {}
    assert asked == {**own, **single, **options, "stream": False}


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        (CHAT, CHATS, ""),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, ""),
        (RESPONSES, {"input": "a"}, ""),
        (MESSAGES, CHATS, ""),
        (EMBEDDINGS, {"input": "a"}, "route"),
        ("/score", {}, "route"),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, "route"),
        (RESPONSES, {"input": "a", "background": True}, "route"),
        (CHAT, {**CHATS, "n": 2}, "several"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "several"),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "several"),
        (CHAT, {**CHATS, "kv_transfer_params": {"a": 1}}, "own_params"),
        (CHAT, {**CHATS, "kv_transfer_params": None}, ""),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1}, "no_cache"),
    ],
)
def test_requests_that_p_cannot_prefill_are_ds_alone(path: str, fields: Any, why: str) -> None:
    assert unfit(read_call(path, json.dumps(fields).encode())) == why


def test_what_a_client_that_is_not_trusted_says_of_kv_does_not_keep_p_away() -> None:
    body = b'{"prompt": "a", "kv_transfer_params": {"a": 1}}'
    assert unfit(read_call(COMPLETIONS, body, is_trusted=False)) == ""


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"[]", b"{}", b"[" * 9999, b'{"kv_transfer_params": null}'),
        *(b'{"kv_transfer_params": { }}', b'{"kv_transfer_params": []}'),
        b'{"kv_transfer_params": "\xff"}',
    ],
)
def test_an_answer_without_parameters_is_none_of_p(answer: bytes) -> None:
    assert params_of(answer) is None


# One request, at scripted engines -----------------------------------------------------------------


@asynccontextmanager
async def apart(
    *engines: Engine, prefillers: int = 2, local_tokens: int = 1, **options: Any
) -> AsyncIterator[Fronted]:
    """Serve a front whose engines decode, beside some that prefill: tries meet these, in order."""
    async with fronted(*engines, local_tokens=local_tokens, **options) as served:
        served.scripted.role, served.scripted.prefillers = "decode", [P, P2, P3][:prefillers]
        yield served


def prefills(answer: bytes = PREFILLED, status: int = 200) -> Engine:
    return Engine([answer], status, JSON)


def where(served: Fronted) -> list[str]:
    """The engines that received something, in order; with "+" what P had said."""
    found = []
    for url, _, body, _ in served.scripted.sent:
        params = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get("kv_transfer_params")
        is_ps = params is not None and bytes(params) == PARAMS
        found.append(url.removeprefix("http://") + ("+" if is_ps else ""))
    return found


async def test_p_prefills_and_its_parameters_reach_d_as_they_are() -> None:
    async with apart(prefills(), Engine(), explains=True) as served:
        status, headers, body = await served.ask(b"x-request-id: mine", max_tokens=7)
        assert (status, body) == (200, b"".join(STREAM))
        await served.ended()
        (_, path, asked, fields), (_, d_path, sent, d_fields) = served.scripted.sent
        assert where(served) == ["p0", "e0+"]
        assert path == d_path == CHAT
        read = json.loads(asked)
        assert read["kv_transfer_params"] == ASKED
        assert (read["max_tokens"], read["stream"], read["stream_options"]) == (1, False, None)
        assert json.loads(sent)["max_tokens"] == 7
        assert sent.endswith(b'"kv_transfer_params":' + PARAMS + b"}")
        assert (fields[b"x-request-id"], d_fields[b"x-request-id"]) == (b"mine-p1-0", b"mine")
        assert headers[b"x-kvindex-prefill"] == b"p0/0"
        assert served.scripted.log == [
            *(("reserve", D), ("reserve", P), ("fetch", D)),
            ("prefilled", P),
            *(("first_token", D), ("finish", P, 7), ("complete",), ("finish", D, 7)),
        ]
        assert served.scripted.places[1].outcomes == ["answered"]


async def test_what_d_misses_is_weighed_with_local_tokens() -> None:
    async with apart(Engine(), local_tokens=2) as served:
        assert (await served.ask())[0] == 200
        await served.ended()
        assert where(served) == ["e0"]
        assert served.access.statistics()["prefills"] == {"local": 1}
        assert served.scripted.log[:2] == [("reserve", D), ("first_token", D)]


async def test_an_engine_without_a_role_receives_what_it_received_before() -> None:
    bodies = []
    for prefillers in (0, 2):
        async with apart(Engine(), prefillers=prefillers) as served:
            served.scripted.role = ""
            await served.ask(b"x-request-id: mine")
            await served.ended()
            bodies.append(served.scripted.sent)
            assert served.access.statistics()["prefills"] == {}
    assert bodies[0] == bodies[1]


FAILS = [
    *(Engine(fails=reason) for reason in ("refused", "reset", "timeout_head", "too_long")),
    *(Engine([b"{}"], status, JSON) for status in (400, 404, 429, 500, 501, 503)),
    Engine([b"{}"], headers=JSON),
    Engine([b"garbage"], headers=JSON),
]
NAMES = [engine.fails or f"{engine.status} {engine.pieces}" for engine in FAILS]


@pytest.mark.parametrize("failing", FAILS, ids=map(str, NAMES))
async def test_a_p_that_fails_is_replaced_once(failing: Engine) -> None:
    async with apart(failing, prefills(), Engine()) as served:
        assert (await served.ask())[0] == 200
        await served.ended()
        assert where(served) == ["p0", "p1", "e0+"]
        assert ("cancel", P) in served.scripted.log
        assert ("finish", P2, 7) in served.scripted.log
        is_its_own = not 400 <= failing.status < 500 and failing.status != 501
        assert (served.scripted.places[1].outcomes != ["answered"]) is is_its_own
        ids = [fields[b"x-request-id"] for *_, fields in served.scripted.sent]
        assert len(set(ids)) == 3


async def test_a_p_that_counts_its_ranks_otherwise_is_learnt_of() -> None:
    refusal = b'{"error": "no such rank"}'
    async with apart(Engine([refusal], 400, JSON), prefills(), Engine()) as served:
        assert (await served.ask())[0] == 200
        await served.ended()
        assert ("misnumbered", P, refusal) in served.scripted.log


@pytest.mark.parametrize("failing", FAILS, ids=map(str, NAMES))
async def test_after_two_of_them_d_prefills_by_itself(
    failing: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    async with apart(failing, failing, Engine(), prefillers=3) as served:
        with caplog.at_level(logging.INFO, "kvindex.gateway.access"):
            assert (await served.ask())[0] == 200
            await served.ended()
        assert where(served) == ["p0", "p1", "e0"]
        assert served.scripted.log[-4:] == [
            *(("compute", D), ("first_token", D), ("complete",), ("finish", D, 7))
        ]
        (line,) = [json.loads(record.message) for record in caplog.records]
        told = (line["disaggregated"], line["prefill"], line["prefill_rank"], line["moved"])
        assert told == (False, "failed", None, 0)
        assert [failure.split()[0] for failure in line["failures"]] == ["p0/0", "p1/0"]
        assert line["tries"] == 1


@pytest.mark.parametrize(("prefillers", "reason"), [(0, "no_prefill"), (1, "failed")])
async def test_without_a_p_that_answers_d_prefills_by_itself(prefillers: int, reason: str) -> None:
    engines = [Engine(fails="refused")] * prefillers
    async with apart(*engines, Engine(), prefillers=prefillers) as served:
        assert (await served.ask())[0] == 200
        await served.ended()
        assert where(served) == [*["p0"] * prefillers, "e0"]
        assert served.access.statistics()["prefills"] == {reason: 1}


@pytest.mark.parametrize("last_role", ["decode", ""])
async def test_another_d_is_alone_where_no_p_has_answered_and_so_is_one_without_a_role(
    last_role: str,
) -> None:
    refused = Engine(fails="refused")
    phase = [refused, refused] if last_role else [prefills()]
    async with apart(*phase, refused, Engine(), prefillers=3) as served:
        served.scripted.roles = {D2: last_role}
        assert (await served.ask())[0] == 200
        await served.ended()
        assert where(served) == (["p0", "p1", "e0", "e1"] if last_role else ["p0", "e0+", "e1"])
        assert served.access.statistics()["prefills"] == ({"failed": 1} if last_role else {})


ERROR = b'data: {"error":{"message":"no KV","type":"InternalServerError","code":500}}\n\n'


@pytest.mark.parametrize(
    ("failing", "is_stream"),
    [
        (Engine([b'{"error":{}}'], 500, JSON), True),
        (Engine([ERROR, DONE]), True),
        (Engine([b'{"error":{"code":500}}'], headers=JSON), False),
    ],
    ids=["500", "error event", "error body"],
)
async def test_what_p_has_lost_d_computes_by_itself(
    failing: Engine, is_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    last = Engine() if is_stream else Engine([WHOLE], headers=JSON)
    async with apart(prefills(), failing, last) as served:
        with caplog.at_level(logging.INFO, "kvindex.gateway.access"):
            status, _, body = await served.ask(stream=is_stream)
            await served.ended()
        assert (status, body) == (200, b"".join(STREAM) if is_stream else WHOLE)
        assert where(served) == ["p0", "e0+", "e0"]
        (line,) = [json.loads(record.message) for record in caplog.records]
        assert (line["disaggregated"], line["prefill"], line["tries"]) == (False, "lost", 2)
        assert [failure.split()[0] for failure in line["failures"]] == ["p0/0"]
        # It is no fault of D, and P's blocks are waited for no longer.
        assert [place.outcomes for place in served.scripted.places] == [
            *([], ["answered"]),
            ["answered"],
        ]
        assert served.scripted.log.count(("finish", P, 7)) == 1


@pytest.mark.parametrize(
    ("begun", "prefill", "outcomes"),
    [(ROLE, "lost", []), (event("x"), "apart", ["error_event"])],
    ids=["before its content", "after it"],
)
async def test_an_error_that_is_forwarded_is_ds_fault_only_once_it_has_ps_blocks(
    begun: bytes, prefill: str, outcomes: list[str]
) -> None:
    async with apart(prefills(), Engine([begun, ERROR, DONE])) as served:
        assert (await served.ask())[2] == begun + ERROR + DONE
        await served.ended()
        assert served.access.statistics()["prefills"] == {prefill: 1}
        assert served.scripted.places[0].outcomes == outcomes


async def test_a_500_of_d_alone_is_the_clients_to_see() -> None:
    refusal = Engine([b'{"error":{}}'], 500, JSON)
    async with apart(prefills(), refusal, refusal) as served:
        assert (await served.ask())[0] == 500
        await served.ended()
        assert where(served) == ["p0", "e0+", "e0"]
    async with apart(refusal, local_tokens=9) as served:
        assert (await served.ask())[0] == 500


@pytest.mark.parametrize(
    "failing",
    [Engine(fails="refused"), Engine([], 503, JSON), Engine([ROLE[:9], "reset"])],
    ids=["refused", "503", "half an event"],
)
async def test_another_d_gets_a_prefill_of_its_own(failing: Engine) -> None:
    async with apart(prefills(), failing, prefills(), Engine()) as served:
        assert (await served.ask())[0] == 200
        await served.ended()
        assert where(served) == ["p0", "e0+", "p0", "e1+"]
        log = served.scripted.log
        assert log.index(("finish", P, 7)) < log.index(("reserve", D2)), "nobody fetches it"
        assert log.count(("finish", P, 7)) == 2
        ids = [fields[b"x-request-id"] for *_, fields in served.scripted.sent]
        assert len(set(ids)) == 4


async def test_what_d_refuses_is_the_clients_to_see() -> None:
    async with apart(prefills(), Engine([b'{"error":{}}'], 400, JSON)) as served:
        assert (await served.ask())[0] == 400
        await served.ended()
        assert served.scripted.log[-3:] == [("complete",), ("cancel", D), ("finish", P, 7)]


async def test_once_the_answer_has_begun_nothing_is_tried_again() -> None:
    async with apart(prefills(), Engine([ROLE, event("x"), "reset"])) as served:
        client = await served.begin()
        assert (await client.head())[0] == 200
        body, is_whole = await client.chunks()
        assert b'"error"' in body
        assert not is_whole
        await served.ended()
        assert where(served) == ["p0", "e0+"]


async def test_a_client_that_leaves_ends_ps_work() -> None:
    hang = Hang()
    async with apart(Engine(fails=hang)) as served:
        client = await served.begin()
        await hang.begun.wait()
        client.writer.close()
        await served.ended()
        assert sorted(served.scripted.log[-2:]) == [("cancel", D), ("cancel", P)]
        assert served.access.statistics()["prefills"] == {"left": 1}


@pytest.mark.parametrize(("head_within", "within"), [(600.0, 60.0), (30.0, 30.0)])
async def test_a_p_that_hangs_does_not_cost_the_time_of_a_whole_answer(
    head_within: float, within: float
) -> None:
    async with apart(prefills(), Engine(), head_within=head_within) as served:
        assert (await served.ask())[0] == 200
        assert served.scripted.within == [within]


async def test_a_bug_while_p_is_asked_is_no_client_that_has_left() -> None:
    async with apart(Engine(fails=ValueError("a bug"))) as served:
        assert (await served.ask())[0] == 500
        await served.ended()
        assert sorted(served.scripted.log[-2:]) == [("cancel", D), ("cancel", P)]
        assert served.access.statistics()["prefills"] == {"failed": 1}


async def test_a_client_that_leaves_between_the_phases_leaves_d_to_fetch_what_p_keeps() -> None:
    hang = Hang()
    async with apart(prefills(), Engine(fails=hang)) as served:
        client = await served.begin()
        await hang.begun.wait()
        client.writer.close()
        await served.ended()
        assert served.scripted.log[-2:] == [("cancel", D), ("finish", P, 7)]
        assert ("unsent",) not in served.scripted.log, "else P would keep its blocks for long"
        await served.until(lambda: ("unsent",) in served.scripted.log)  # but not without an end


async def test_a_client_that_leaves_just_after_ds_head_leaves_d_to_fetch_what_p_keeps() -> None:
    hang = Hang()
    async with apart(prefills(), Engine([ROLE, hang])) as served:
        client = await served.begin()
        await hang.begun.wait()
        client.writer.close()
        await served.ended()
        assert served.scripted.log[-2:] == [("cancel", D), ("finish", P, 7)]
        assert ("close",) not in served.scripted.log
        await served.until(lambda: ("close",) in served.scripted.log)  # but not without an end


async def test_what_d_answers_to_nobody_is_closed() -> None:
    hang, answering = Hang(), Engine([ROLE, Hang()])
    async with apart(prefills(), answering) as served:
        send = served.scripted.send

        async def held_back(*arguments: Any, **named: Any) -> Any:
            answer = await send(*arguments, **named)
            try:
                await hang.wait(until=left)
            except BaseException:  # on a slow machine, as `Upstream.send`
                answer.close()
                raise
            return answer

        left = asyncio.Event()
        served.scripted.send = held_back  # type: ignore[method-assign]
        client = await served.begin()
        await hang.begun.wait()
        client.writer.close()
        await served.ended()
        left.set()
        await served.until(lambda: ("close",) in served.scripted.log)


async def test_what_no_d_fetches_counts_until_the_lease_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pairs, "LEASE", 0.0)
    hang = Hang()
    async with apart(prefills(), Engine(fails=hang)) as served:
        client = await served.begin()
        await hang.begun.wait()
        await served.until(lambda: ("finish", P, 7) in served.scripted.log)
        client.writer.close()
        await served.ended()
        assert served.scripted.log.count(("finish", P, 7)) == 1


async def test_no_d_is_a_503() -> None:
    async with apart() as served:
        served.scripted.refusal = NoRankError({})
        assert (await served.ask())[0] == 503


async def test_what_moves_and_whose_hit_it_is_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with apart(prefills(), Engine([WHOLE], headers=JSON)) as served:
        served.scripted.ranks = [D]
        with caplog.at_level(logging.INFO, "kvindex.gateway.access"):
            await served.ask(stream=False)
            await served.ended()
        (line,) = [json.loads(record.message) for record in caplog.records]
        told = {name: line[name] for name in ("rank", "prefill", "prefill_rank", "moved", "held")}
        assert told == {
            "rank": "e0/0",
            "prefill": "apart",
            "prefill_rank": "p0/0",
            "moved": 2,
            "held": 8,
        }
        statistics = served.access.statistics()
        assert statistics["prefills"] == {"apart": 1}
        assert statistics["tokens"]["moved"] == 2


# Which engines ------------------------------------------------------------------------------------


def fleet_of(*roles: str, **options: Any) -> Fleet:
    """Engines with these roles: the first letter of each is its name."""
    fleet = Fleet(**options)
    fleet.set(**{role[0]: report(role[0], "m", role=role[1:]) for role in roles})
    return fleet


async def prefiller(fleet: Fleet, exclude: Any = ()) -> str:
    place = fleet.routing.reserve_prefill(
        "m", PROMPT, exclude=exclude, prompt_tokens=len(PROMPT), salt=None, request_id="p"
    )
    if place is None:
        return ""
    place.cancel()
    return place.rank.worker


async def test_an_engine_that_prefills_answers_no_request_whatever_it_holds() -> None:
    fleet = fleet_of("aprefill", "bdecode", "c")
    hold(fleet.index, Rank("a"), 10)
    assert {(await fleet.reserve()).rank.worker for _ in range(4)} == {"b", "c"}
    assert await prefiller(fleet) == "a"
    with pytest.raises(NoRankError):
        await fleet.reserve(workers=["a"])


async def test_engines_with_roles_change_them_and_those_without_serve_all() -> None:
    fleet = fleet_of("aprefill")
    with pytest.raises(NoRankError):
        await fleet.reserve()
    assert (fleet.routing.is_ready, fleet.routing.listed()) == (False, [])
    fleet.set(a=report("a", "m"))
    assert (await fleet.reserve()).rank == Rank("a")
    assert await prefiller(fleet) == ""
    assert fleet.routing.is_ready


async def test_a_model_that_was_unloaded_meanwhile_has_no_p() -> None:
    fleet = fleet_of("aprefill", "bdecode")
    fleet.set()
    assert await prefiller(fleet) == ""


async def test_the_only_engine_that_answers_knows_best_which_responses_it_has() -> None:
    body = b'{"model": "m", "input": "a", "previous_response_id": "resp_1"}'
    assert (
        await makers_of(read_call(RESPONSES, body), fleet_of("aprefill", "bdecode").routing) is None
    )


async def test_the_best_p_is_chosen_by_its_blocks_and_load_and_not_twice_if_it_failed() -> None:
    fleet = fleet_of("aprefill", "bprefill", "cdecode")
    hold(fleet.index, Rank("b"), 10)
    assert await prefiller(fleet) == "b"
    assert await prefiller(fleet, [Rank("b")]) == "a"
    assert await prefiller(fleet, [Rank("b"), Rank("a")]) == ""


@pytest.mark.parametrize("why", ["ejected", "drained", "silent", "asleep", "full"])
async def test_a_p_that_would_not_answer_is_left_alone_even_if_it_is_the_only_one(why: str) -> None:
    limits = {"filters": [Capacity(open_requests=1)]} if why == "full" else {}
    fleet = fleet_of("aprefill", "bdecode", **limits)
    assert await prefiller(fleet) == "a"
    if why == "ejected":
        fleet.routing.prefill_ejection.failed("a", is_down=True)
    elif why == "drained":
        fleet.routing.drain("a")
    elif why == "full":
        fleet.models.routers["m"].book("a", 10, 10)
    else:
        fields = {"is_silent": True} if why == "silent" else {"away": "asleep"}
        fleet.set(a=report("a", "m", role="prefill", **fields), b=report("b", "m", role="decode"))
    assert await prefiller(fleet) == ""


async def test_ps_that_fail_leave_ds_that_fail_ejected() -> None:
    fleet = fleet_of("aprefill", "bdecode", "cdecode", filters=[ejection := Ejection()])
    fleet.routing.ejection = ejection
    place = fleet.routing.reserve_prefill(
        "m", PROMPT, exclude=[], prompt_tokens=len(PROMPT), salt=None, request_id="p"
    )
    assert place is not None
    place.failed("refused")
    place.cancel()
    decoder = await fleet.reserve()
    decoder.failed("refused")
    left = {(await fleet.reserve()).rank.worker for _ in range(4)}
    assert left == {"b", "c"} - {decoder.rank.worker}
    assert set(fleet.routing.ejected()["ejected"]) == {"a", decoder.rank.worker}
    assert fleet.routing.statistics()["ejections"] == 2


async def test_a_d_that_serves_for_want_of_others_is_not_told_as_left_out() -> None:
    fleet = fleet_of("aprefill", "bdecode")
    (await fleet.reserve()).failed("refused")
    assert not fleet.routing.ejected()["ejected"]


async def test_a_rank_that_has_seen_a_prompts_media_lacks_little_of_it() -> None:
    fleet = fleet_of("aprefill", "bdecode", "cdecode")
    seen = []
    for media in (b"cat", b"cat", b"dog"):
        place = await fleet.reserve(token_ids=None, reads_cache=False, media=media)
        seen.append((place.has_seen, place.missing))
        place.finish(None, counts=True)
    assert seen == [(False, 100), (True, 0), (False, 100)]


async def test_of_what_is_prefilled_only_the_blocks_count_until_they_are_fetched() -> None:
    fleet = fleet_of("aprefill", "bdecode", filters=[Capacity(open_requests=1)])
    place = fleet.routing.reserve_prefill(
        "m", PROMPT, exclude=[], prompt_tokens=len(PROMPT), salt=None, request_id="first"
    )
    assert place is not None
    assert await prefiller(fleet) == ""
    place.prefilled()
    assert await prefiller(fleet) == "a"
    router = fleet.models.routers["m"]
    assert router.load("a") == Load(0, 0, 11)
    place.finish(0, counts=True)
    assert router.load("a") == Load(0, 0, 0)


async def test_the_booking_of_d_does_not_expire_while_p_works() -> None:
    fleet = fleet_of("aprefill", "bdecode", clock=(clock := Clock()), expires_after=100.0)
    decoder = await fleet.reserve()
    decoder.fetch()
    clock.now += 60.0
    decoder.fetched()
    clock.now += 90.0
    assert fleet.models.routers["m"].load("b").open_requests == 1
    decoder.cancel()


async def test_what_another_rank_prefills_is_no_load_to_wait_for_and_no_hit_of_d() -> None:
    fleet = fleet_of("aprefill", "bdecode")
    hold(fleet.index, Rank("a"), 10)
    decoder = await fleet.reserve()
    router = fleet.models.routers["m"]
    assert router.load("b").queued_tokens == decoder.missing == len(PROMPT)
    decoder.fetch()
    assert (router.load("b").queued_tokens, router.load("b").open_requests) == (0, 1)
    decoder.compute()
    assert router.load("b").queued_tokens == len(PROMPT)
    decoder.fetch()
    decoder.first_token()
    decoder.finish(160, counts=True)
    statistics = router.statistics()
    assert statistics["funnel"]["finished"]["requests"] == 0
    assert statistics["ranks"]["b/0"]["open_requests"] == 0
