"""`--kv-source`: engines are told where KV lies, pull it or not, and the gateway counts which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvindex import ConfigurationError, Rank
from kvindex.gateway.calls import CHAT, COMPLETIONS, EMBEDDINGS, read_call, request_headers
from kvindex.gateway.request_life import Exchange
from kvindex.gateway.routing import Pin, Serving, source_fields
from kvindex.gateway.settings import GatewaySettings
from kvindex.routing import KvSource
from tests.gateway.lives import LoggedReservation, call_of
from tests.gateway.test_gateway import (
    TOKEN,
    WITH_AND_WITHOUT,
    Gateway,
    cached_in,
    chat,
    faulty,
    gateway_of,
    live_ranks,
)
from tests.gateway.test_models import Fleet, report
from tests.live import until
from tests.routing.fleet import PROMPT, hold
from tests.tools.commands import http_engines

PREFIX = "What a fleet knows already need not be computed again. " * 20
HEADER = b"x-kv-cache-source-host-port"

pytestmark = pytest.mark.service


# What engines are told ----------------------------------------------------------------------------


def _where(pin: Pin) -> dict[str, Any]:
    where: dict[str, Any] = pin.body_fields["kv_transfer_params"]["remote_kv_source"]
    return where


@pytest.mark.parametrize(
    ("form", "url", "rank", "host", "port"),
    [
        ("vllm:5710", "http://10.0.0.1:8000", 0, "10.0.0.1", 5710),
        ("vllm:5710", "http://10.0.0.1:8000", 5, "10.0.0.1", 5715),  # its number of all ranks
        ("vllm:+1000", "http://10.0.0.1:8000", 4, "10.0.0.1", 9004),
        ("vllm:5710", "https://[fd00::1]/", 0, "[fd00::1]", 5710),
    ],
)
def test_vllm_is_told_the_address_of_the_p2p_tier_of_a_rank(
    form: str, url: str, rank: int, host: str, port: int
) -> None:
    source = Serving("a", url, "vllm", first_rank=4 if rank else 0, ranks=4)
    told = [_where(source_fields(form, source, Rank("a", rank))) for _ in range(2)]
    assert [(where["remote_host"], where["remote_port"]) for where in told] == [(host, port)] * 2
    assert told[0]["kv_request_id"] != told[1]["kv_request_id"]


def test_released_vllm_reads_what_it_is_told() -> None:
    manager = pytest.importorskip("vllm.v1.kv_offload.tiering.p2p.manager")
    pin = source_fields("vllm:5710", Serving("a", "http://10.0.0.1:8000", "vllm"), Rank("a"))
    read = manager._parse_source(pin.body_fields["kv_transfer_params"])
    assert (read.peer_id, read.do_probe) == ("10.0.0.1:5710", True)
    assert read.kv_request_id == _where(pin)["kv_request_id"]


@pytest.mark.parametrize(
    ("url", "rank", "value"),
    [
        ("http://10.0.0.1:8000", 4, b"10.0.0.1:8000"),
        ("http://10.0.0.1:8000", 6, b"10.0.0.1:8002"),
        ("http://10.0.0.1", 4, b"10.0.0.1:80"),
        ("https://[fd00::1]", 4, b"[fd00::1]:443"),
    ],
)
def test_llm_ds_side_car_is_told_the_endpoint_of_a_rank(url: str, rank: int, value: bytes) -> None:
    source = Serving("a", url, "sglang", first_rank=4, ranks=4)
    assert source_fields("llm-d", source, Rank("a", rank)) == Pin(((HEADER, value),))


@pytest.mark.parametrize(
    ("kinds", "form", "is_told"),
    [
        (("vllm", "vllm"), "vllm:5710", True),
        (("vllm", "sglang"), "vllm:5710", False),
        (("sglang", "vllm"), "vllm:5710", False),
        (("", "vllm"), "vllm:5710", False),
        (("sglang", "sglang"), "llm-d", True),
        (("vllm", "vllm"), None, False),
    ],
)
async def test_only_engines_that_can_pull_are_told(
    kinds: tuple[str, str], form: str | None, is_told: bool
) -> None:
    fleet = Fleet(policy="round-robin", min_tokens=16)
    fleet.routing._kv_source = form
    engines = zip("ab", kinds, strict=True)
    fleet.set(**{name: structs.replace(report(name, "m"), kind=kind) for name, kind in engines})
    hold(fleet.index, Rank("b"), 10)
    reservation = await fleet.reserve(token_ids=PROMPT, may_pull=True)
    assert reservation.rank == Rank("a")
    assert (reservation.source is not None) == (reservation.told != Pin()) == is_told
    told = reservation.source, reservation.told
    reservation.fetch()
    reservation.compute()
    assert (reservation.source, reservation.told) == told, "no other rank has prefilled it"
    reservation.finish(160, counts=True)
    sources = fleet.models.routers["m"].statistics()["funnel"]["sources"]
    assert sources == {"pulled": int(is_told), "not_pulled": 0, "unknown": 0}
    reservation.fetched()
    assert (reservation.source, reservation.told) == (None, Pin())


async def test_the_blocks_of_another_model_are_no_source() -> None:
    fleet = Fleet(min_tokens=16)
    fleet.routing._kv_source = "vllm:5710"
    fleet.set(a=report("a", "m"), b=report("b", "other"))
    hold(fleet.index, Rank("b"), 10)
    assert (await fleet.reserve(token_ids=PROMPT, may_pull=True)).source is None


@pytest.mark.parametrize("form", ["", "vllm", "vllm:", "vllm:x", "vllm:-1", "sglang", "llm-d:1"])
def test_a_form_that_is_none_is_refused(form: str) -> None:
    with pytest.raises(ConfigurationError, match=r"vllm:PORT, vllm:\+N or llm-d"):
        GatewaySettings(kv_source=form)


def test_a_pull_rate_without_a_form_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs kv_source"):
        GatewaySettings(pull_rate=1)


def test_what_a_try_is_told_is_in_its_head_and_body() -> None:
    exchange, reservation = Exchange(call_of(), "id", 0.0), LoggedReservation([], Rank("a", 1))
    reservation.told = Pin(((HEADER, b"10.0.0.1:80"),), {"kv_transfer_params": {}})
    exchange.reserved(reservation, 0.0)
    assert exchange.own_headers == [(b"x-data-parallel-rank", b"1"), (HEADER, b"10.0.0.1:80")]
    assert exchange.own_fields == {"kv_transfer_params": {}}


def test_a_proxy_does_not_try_again_where_the_request_would_pull_from_itself() -> None:
    stream = pytest.importorskip("kvindex.gateway.picker.stream")
    reservations = [LoggedReservation([], Rank(worker)) for worker in "abc"]
    own, servings = reservations[0], [each.serving for each in reservations]
    routing = Fleet().routing
    others = [[each.worker for each in stream._others(own, servings, routing)]]
    own.source = KvSource(Rank("b"), 1_000, 1_000, {})
    others.append([each.worker for each in stream._others(own, servings, routing)])
    assert others == [["b", "c"], ["c"]]


# What clients say ---------------------------------------------------------------------------------


OWN = {"kv_transfer_params": {"remote_kv_source": {"remote_host": "10.9.9.9"}}}


@pytest.mark.parametrize("own", [OWN, {"kv_hints": {"actions": []}}, {**OWN, "kv_hints": {}}])
def test_a_clients_own_fields_pass_and_stand_or_are_left_out(own: dict[str, Any]) -> None:
    fields = {"prompt": "Once \u20ac", "seed": 2**70, "top_p": 0.1}
    body = json.dumps({**fields, **own}).encode()
    trusted = read_call(COMPLETIONS, body)
    assert (trusted.body, trusted.may_pull) == (body, False)
    stranger = read_call(COMPLETIONS, body, is_trusted=False)
    assert json.loads(stranger.body) == stranger.fields == fields
    assert stranger.may_pull


@pytest.mark.parametrize("odd", [b"NaN", b"1e400"])
def test_they_are_left_out_of_odd_bodies_too(odd: bytes) -> None:
    body = b'{"prompt": "a", "x": %b, "kv_hints": {}}' % odd
    call = read_call(COMPLETIONS, body, is_trusted=False)
    assert call.is_odd
    assert b"kv_hints" not in call.body


def test_a_body_without_them_passes_byte_for_byte() -> None:
    body = b'{ "prompt":"a" ,"x": 1.0 }'
    assert read_call(COMPLETIONS, body, is_trusted=False).body == body


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": ["a", "b"]}),  # of which prompt would it be?
        (COMPLETIONS, {"prompt": "a", "n": 2}),
        (EMBEDDINGS, {"input": "a"}),  # vLLM reads no such field there
    ],
)
def test_requests_of_several_prompts_or_answers_are_not_told(path: str, fields: Any) -> None:
    assert not read_call(path, json.dumps(fields).encode()).may_pull


def test_a_client_names_no_source_by_a_header() -> None:
    assert request_headers([(HEADER, b"10.9.9.9:1")], passes_keys=True) == []


# From end to end ----------------------------------------------------------------------------------


def _ask(served: Gateway, text: str, authorization: str = "", **fields: Any) -> int:
    """Send a chat; return the tokens found cached once the gateway has the events of it."""
    status, body = served.ask(CHAT, chat(text, **fields), authorization=authorization)
    assert status == 200, body
    ranks = [rank for engine in served.engines for rank in engine._routes.ranks.values()]
    until(lambda: _batches(served, authorization) == sum(rank.published for rank in ranks))
    return cached_in(body)


def _batches(served: Gateway, authorization: str) -> float:
    text = served.ask("/metrics", authorization=authorization)[1].decode()
    lines = [line for line in text.splitlines() if line.startswith("kvindex_batches_total{")]
    return sum(float(line.split()[-1]) for line in lines)


@WITH_AND_WITHOUT
def test_what_an_engine_is_told_it_pulls_or_not_and_both_are_counted(
    options: tuple[str, ...],
) -> None:
    told = ("--kv-source", "vllm:+1000", "--policy", "round-robin", "--access-log")
    with http_engines("a", "b") as engines:
        urls = [engine.url for engine in engines]
        with gateway_of(engines, *options, *told, *urls) as served:
            until(lambda: live_ranks(served) == 2)
            assert _ask(served, PREFIX) == 0
            assert _ask(served, f"{PREFIX} And?") > 1_000
            with faulty(*engines, pull="refuse", pull_seconds=0.05):
                assert _ask(served, f"Refused. {PREFIX}") == 0
                assert _ask(served, f"Refused. {PREFIX} And?") == 0
            with faulty(*engines, pull="lie"):
                assert _ask(served, f"A lie. {PREFIX}") == 0
                assert _ask(served, f"A lie. {PREFIX} And?") > 1_000
            # An engine that lies is believed: no event says how its blocks came.
            sources = served.settled()["routers"]["fake-model"]["funnel"]["sources"]
            assert sources == {"pulled": 2, "not_pulled": 1, "unknown": 0}
            series = b'kvindex_routed_sources_total{model="fake-model",outcome="not_pulled"} 1.0'
            assert series in served.ask("/metrics")[1]
            lines = [json.loads(served.process.err.readline()) for _ in range(6)]
            assert [line.get("pulled") for line in lines] == [None, True, None, False, None, True]
            assert {line["source"] for line in lines[1::2]} == {lines[0]["rank"]}


@WITH_AND_WITHOUT
@pytest.mark.parametrize("has_keys", [False, True], ids=["trusted", "with a key"])
def test_a_clients_own_source_is_its_own_matter_unless_it_needs_a_key(
    options: tuple[str, ...], has_keys: bool, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN)
    files = ("--token-file", str(tokens), "--admin-token-file", str(tokens)) if has_keys else ()
    key = f"Bearer {TOKEN}" if has_keys else ""
    with http_engines("a", "b") as engines:
        urls = [engine.url for engine in engines]
        with gateway_of(engines, *options, *files, "--policy", "round-robin", *urls) as served:
            both = b'kvindex_ranks{state="live"} 2.0'
            until(lambda: both in served.ask("/metrics", authorization=key)[1])
            _ask(served, PREFIX, key)
            first = next(engine for engine in engines if engine.requests)
            port = int(first.url.rpartition(":")[2]) + 1000
            where = {"kv_request_id": "x", "remote_host": "127.0.0.1", "remote_port": port}
            own = {"kv_transfer_params": {"remote_kv_source": where}}
            assert (_ask(served, f"{PREFIX} And?", key, **own) > 1_000) is not has_keys
