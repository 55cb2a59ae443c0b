"""Fake engines with prefill and decode apart: what P keeps, what D fetches, and what goes wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from urllib.error import URLError

import pytest

from kvindex import BlockStored
from kvindex.testing import FakeEngine, HttpEngine, HttpFaults, HttpOptions, ManualClock
from tests.testing.test_http_engine import ask, refusal
from tests.tools.commands import started

pytestmark = pytest.mark.e2e

PROMPT = list(range(1, 31))  # 7 whole blocks and half of an eighth
BLOCK_BYTES = 4 * 256


class Pair(NamedTuple):
    """A P and a D, each with its cache."""

    p: HttpEngine
    d: HttpEngine
    p_cache: FakeEngine
    d_cache: FakeEngine
    clock: ManualClock

    def prefill(self, prompt: list[int] = PROMPT) -> Any:
        """Ask P as a gateway does."""
        body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        return ask(self.p.url + "/v1/completions", body)

    def body(self, params: Any, prompt: list[int] = PROMPT) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}

    def decode(self, params: Any, prompt: list[int] = PROMPT) -> Any:
        return ask(self.d.url + "/v1/completions", self.body(params, prompt))

    def moved(self) -> tuple[int, int]:
        """By D's metrics: transfers, and blocks in them."""
        values = {
            line.partition("{")[0]: float(line.split()[-1])
            for line in self.d.metrics().splitlines()
            if line.startswith("vllm:nixl_bytes_transferred_")
        }
        name = "vllm:nixl_bytes_transferred_"
        return int(values[name + "count"]), int(values[name + "sum"]) // BLOCK_BYTES


@contextmanager
def pair(**d_options: Any) -> Iterator[Pair]:
    clock = ManualClock()
    with ExitStack() as opened:
        caches = [
            opened.enter_context(FakeEngine(name, block_size=4, num_blocks=20, publish=False))
            for name in "pd"
        ]
        options = HttpOptions(role="prefill")
        p = opened.enter_context(HttpEngine(caches[0], options=options, clock=clock))
        options = HttpOptions(role="decode", **d_options)
        d = opened.enter_context(HttpEngine(caches[1], options=options))
        yield Pair(p, d, caches[0], caches[1], clock)


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_d_fetches_what_p_computed_announces_it_and_reports_ps_hit() -> None:
    with pair() as two:
        ask(two.p.url + "/v1/completions", {"prompt": PROMPT[:9], "max_tokens": 1})
        params = two.prefill()["kv_transfer_params"]
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert (params["remote_num_tokens"], params["remote_prefill_cached_tokens"]) == (30, 8)
        assert (two.p.counters["handed_over"], two.p.counters["pinned"]) == (1, 8)

        assert cached(two.decode(params)) == 8, "P's number"
        assert (two.p.counters["fetched"], two.p.counters["pinned"]) == (1, 0)
        (event,) = two.d_cache.events
        assert isinstance(event, BlockStored)
        assert (len(event.block_hashes), event.medium) == (7, "GPU")
        assert two.moved() == (1, 8)


def test_d_fetches_only_what_it_lacks() -> None:
    with pair() as two:
        ask(two.d.url + "/v1/completions", {"prompt": PROMPT[:21], "max_tokens": 1})
        assert cached(two.decode(two.prefill()["kv_transfer_params"])) == 0
        assert two.moved() == (1, 8 - 5)
        assert two.d_cache.hit(PROMPT) == 28


def test_without_parameters_both_are_engines_like_others() -> None:
    with pair() as two:
        for engine in (two.p, two.d):
            body = {"prompt": PROMPT, "max_tokens": 1}
            answers = [ask(engine.url + "/v1/completions", body) for _ in range(2)]
            assert [cached(answer) for answer in answers] == [0, 28]
            assert answers[0]["kv_transfer_params"] is None
        assert two.p.counters["handed_over"] == 0
        assert two.moved() == (0, 0)


def test_what_p_keeps_is_not_evicted_until_its_lease_ends() -> None:
    with pair() as two:
        params = two.prefill()["kv_transfer_params"]
        others = [[100 * n + token for token in range(1, 31)] for n in range(1, 4)]
        ask(two.p.url + "/v1/completions", {"prompt": others[0], "max_tokens": 1})
        two.prefill(others[1])
        code, error = refusal(two.p.url + "/v1/completions", {"prompt": others[2]})
        assert code == 400, "16 of 20 blocks are pinned"
        assert "4 of 20 are free" in error["message"]
        assert two.p_cache.hit(PROMPT) == 28

        two.clock.advance(29.9)
        assert two.p.counters["pinned"] == 16
        two.clock.advance(0.1)
        assert (two.p.counters["pinned"], two.p.counters["expired"]) == (0, 2)
        two.prefill(others[2])
        # As a late D of vLLM, it reads what lies there by then, and nobody sees it.
        two.decode(params)
        assert (two.p.counters["late"], two.p.counters["fetched"]) == (1, 0)


@pytest.mark.parametrize("fault", ["refuse", ""])
def test_when_d_refuses_p_frees_its_blocks_at_once(fault: Any) -> None:
    with pair() as two:
        params = two.prefill()["kv_transfer_params"]
        two.d.faults = HttpFaults(handoff=fault)
        prompt = PROMPT if fault else PROMPT[1:]  # of another length than P's
        assert refusal(two.d.url + "/v1/completions", two.body(params, prompt))[0] == 400
        assert (two.p.counters["refused"], two.p.counters["pinned"]) == (1, 0)
        assert not two.d_cache.truth()
        assert two.p_cache.hit(PROMPT) == 28


def test_a_d_that_ignores_its_parameters_computes_and_leaves_p_pinned() -> None:
    with pair() as two:
        two.d.faults = HttpFaults(handoff="ignore")
        assert two.decode(two.prefill()["kv_transfer_params"])
        assert two.moved() == (0, 0)
        assert two.p.counters["pinned"] == 8


def test_a_d_can_demand_parameters() -> None:
    with pair() as two:
        two.d.faults = HttpFaults(handoff="demand")
        assert refusal(two.d.url + "/v1/completions", {"prompt": PROMPT})[0] == 400
        assert two.decode(two.prefill()["kv_transfer_params"])


def test_parameters_must_reach_d_word_for_word() -> None:
    with pair() as two:
        params = two.prefill()["kv_transfer_params"]
        del params["fake_unknown"]
        code, error = refusal(two.d.url + "/v1/completions", two.body(params))
        assert code == 400
        assert "fake_unknown" in error["message"]


def test_a_p_may_tell_no_parameters_and_streams_have_none() -> None:
    with pair() as two:
        body = two.body({"do_remote_decode": True}) | {"stream": True}
        assert "remote" not in ask(two.p.url + "/v1/completions", body)
        assert two.p.counters["handed_over"] == 1
        two.p.faults = HttpFaults(handoff="none")
        assert two.prefill()["kv_transfer_params"] is None
        assert two.p.counters["handed_over"] == 1


@pytest.mark.parametrize("fault", [HttpFaults(handoff="lost"), HttpFaults(kind="die")])
@pytest.mark.parametrize(("policy", "holds"), [("fail", 0), ("recompute", 28)])
def test_a_p_that_dies_between_the_phases_fails_d_or_has_it_compute(
    fault: HttpFaults, policy: str, holds: int
) -> None:
    with pair(load_failure=policy) as two:
        two.p.faults = fault
        params = two.prefill()["kv_transfer_params"]
        if fault.kind == "die":
            with pytest.raises((URLError, ConnectionError)):
                ask(two.p.url + "/version")
        if policy == "fail":
            assert refusal(two.d.url + "/v1/completions", two.body(params))[0] == 500
        else:
            assert two.decode(params)
        assert two.d_cache.hit(PROMPT) == holds
        assert two.moved() == (0, 0)
        assert two.p.counters["pinned"] == (0 if fault.handoff else 8)


def test_a_p_restarted_by_its_owner_has_nothing_to_fetch() -> None:
    with pair() as two:
        params = two.prefill()["kv_transfer_params"]
        two.p_cache.restart()
        assert refusal(two.d.url + "/v1/completions", two.body(params))[0] == 500


@pytest.mark.parametrize("kind", ["400", "500", "503"])
def test_a_p_refuses_with_the_status_that_it_is_told(kind: Any) -> None:
    with pair() as two:
        two.p.faults = HttpFaults(kind=kind)
        assert refusal(two.p.url + "/v1/completions", two.body(None))[0] == int(kind)


def test_a_transfer_takes_as_long_as_it_is_told() -> None:
    with pair() as two:
        params = two.prefill()["kv_transfer_params"]
        two.d.faults = HttpFaults(pull_seconds=0.05)
        began = time.monotonic()
        two.decode(params)
        assert time.monotonic() - began >= 0.05


def test_engines_of_the_command_line_are_a_pair_too() -> None:
    argv = ("--dp-size", "1", "--rate", "0", "--http", "0", "--endpoint", "tcp://127.0.0.1:0")
    replay = ("--replay-endpoint", "tcp://127.0.0.1:0")
    urls = []
    with ExitStack() as opened:
        for role in ("prefill", "decode"):
            command = opened.enter_context(started("fake-engine", "--role", role, *argv, *replay))
            line = next(line for line in command.out if line.startswith("HTTP at "))
            urls.append(line.split()[-1] + "/v1/completions")
        wanted = {"prompt": PROMPT, "kv_transfer_params": {"do_remote_decode": True}}
        params = ask(urls[0], wanted)["kv_transfer_params"]
        ask(urls[1], {"prompt": PROMPT, "kv_transfer_params": params})
        metrics = ask(urls[1].replace("/v1/completions", "/metrics"))
        assert 'nixl_bytes_transferred_count{engine="0",model_name="fake-model"} 1.0' in metrics
