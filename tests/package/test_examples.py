"""Every example runs by itself, ends by itself, and shows what it says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from kvindex.testing import FakeEngine
from tests.children import ROOT, Program
from tests.native_ring import needs_ring
from tests.nats_server import NatsServer

pytestmark = pytest.mark.e2e

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHOWN = {
    "01_apply_and_match": "after block 12 has left: 16 tokens",
    "02_connect": "best: long/0",
    "03_ordered_events": "a new engine process",
    "04_trust_and_status": "on_loss='keep': 80 tokens before, 80 after the loss",
    "05_test_your_router": "100 prompts routed",
    "06_kv_aware_router": "round-robin",
    "07_warm_restart": "0 restarts, complete True",
    "08_many_router_processes": "60 of 60 answers are the subscriber's own",
    "09_asyncio_router": "0 requests went there afterwards",
    "10_router_in_20_lines": "{'requests': 40, 'asked': 3520,",
    "11_ray_serve": " finished, 0 open",
    "12_fastapi_router": "10 clients went away; 10 were cancelled",
    "13_litellm": "with kvindex",
    "14_proxy": "24 prompts of 10836 tokens",
    "15_two_gateways": "both gateways find all 16 prompts",
    "nano": "to long, which computes 20 of 100 tokens",
}


def run(path: Path, *argv: str) -> str:
    others = packages(path)
    for name in others:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{path.name} shows kvindex in {name}, which is not installed")
    warnings = "default" if others else "error"
    with Program("-W", warnings, str(path), *argv) as example:
        out, err = example.finish()
    assert example.process.returncode == 0, err
    return out


def packages(path: Path) -> set[str]:
    """Return the packages that an example imports, beside kvindex and Python's own."""
    imported = re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
    return set(imported) - {"kvindex", *sys.stdlib_module_names}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=needs_ring if path.stem.startswith("08") else ())
        for path in EXAMPLES
        if not path.stem.startswith("15")
    ],
    ids=lambda path: path.stem,
)
def test_the_example_runs_and_shows_its_point(path: Path) -> None:
    assert SHOWN[path.stem] in run(path)


def test_the_two_gateways_spread_their_requests_together(tmp_path: Path) -> None:
    if importlib.util.find_spec("kvindex.wire._native") is None:
        pytest.skip("a relay needs the native module")
    with NatsServer(tmp_path) as server:
        out = run(ROOT / "examples" / "15_two_gateways.py", server.url)
    assert SHOWN["15_two_gateways"] in out
    assert "open requests: 4 to 4 on each engine" in out


def test_the_ladder_has_no_missing_rung() -> None:
    assert [path.stem for path in EXAMPLES] == list(SHOWN)


def test_a_loss_drops_the_blocks_unless_they_are_to_be_kept() -> None:
    out = run(ROOT / "examples" / "04_trust_and_status.py")
    assert "on_loss='reset': 80 tokens before, 0 after the loss" in out
    assert "nothing listens at tcp://127.0.0.1:9" in out


def test_the_kv_aware_router_beats_round_robin_without_piling_up_load() -> None:
    out = run(ROOT / "examples" / "06_kv_aware_router.py")
    rates = re.findall(r"^(prefix and load|round-robin) +([\d.]+)% +([\d.]+)%", out, re.MULTILINE)
    (_, routed, busiest), (_, in_turn, _) = rates
    assert float(routed) > float(in_turn) + 5
    assert float(busiest) < 35


@pytest.mark.parametrize("name", ["02_connect", "04_trust_and_status"])
def test_the_example_takes_an_endpoint(name: str) -> None:
    with FakeEngine("yours") as engine:
        engine.serve(range(100))
        argv = [engine.endpoint] if name.startswith("04") else [engine.endpoint, _replay(engine)]
        out = run(ROOT / "examples" / f"{name}.py", *argv)
    assert "live" in out


def test_a_router_that_starts_again_replays_what_it_missed_and_notices_a_new_engine() -> None:
    out = run(ROOT / "examples" / "07_warm_restart.py")
    lives = re.findall(r"(\d+) batches replayed, (\d) restarts, complete (\w+)", out)
    (first, *cold), (again, *warm), (_, *anew) = lives
    assert 0 < int(again) < int(first) / 5
    assert (cold, warm, anew) == (["0", "True"], ["0", "True"], ["1", "True"])


def test_the_warm_restart_takes_a_file_and_endpoints(tmp_path: Path) -> None:
    path = tmp_path / "router.kvindex"
    with FakeEngine("vllm-0") as engine:
        for length in (32, 64, 96):
            engine.serve(range(length))
        argv = [str(path), engine.endpoint, _replay(engine)]
        for replayed in (3, 0):
            out = run(ROOT / "examples" / "07_warm_restart.py", *argv)
            assert f"6 blocks, {replayed} batches replayed" in out


def test_the_router_takes_endpoints() -> None:
    with FakeEngine("a") as one, FakeEngine("b") as two:
        argv = [f"a={one.endpoint}", f"b={two.endpoint}"]
        out = run(ROOT / "examples" / "06_kv_aware_router.py", *argv)
    assert out.count(" -> ") == 10
    assert {"a/0", "b/0"} == set(re.findall(r"-> (\S+)", out)), "load spreads what nobody holds"


def test_every_client_of_the_fastapi_router_gives_its_load_back() -> None:
    out = run(ROOT / "examples" / "12_fastapi_router.py")
    assert "30 clients have the whole answer; 30 bookings finished" in out
    assert "(queued_tokens=0, open_requests=0" not in out.partition("clients have")[0]
    assert out.count("afterwards: Load(queued_tokens=0, open_requests=0, decode_blocks=0)") == 3


def test_litellm_finds_more_with_kvindex() -> None:
    by_default, routed = map(
        float, re.findall(r"([\d.]+)% found", run(ROOT / "examples" / "13_litellm.py"))
    )
    assert routed > by_default + 20


def _replay(engine: FakeEngine) -> str:
    assert engine.replay_endpoint is not None
    return engine.replay_endpoint
