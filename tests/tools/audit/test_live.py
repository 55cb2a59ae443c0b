"""`kvindex audit` of live engines, over real sockets."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import cast

import msgspec
import pytest

from kvindex import EventBatch, EventStream, Rank, RankBatch, RankStatus
from kvindex.testing import FakeEngine, HttpEngine
from kvindex.testing.ports import reserve_port
from kvindex.tools.audit import Auditor
from kvindex.tools.cli.audit import Listening
from kvindex.tools.cli.engines import parse_worker
from tests.live import PATIENCE, within, worker_of
from tests.tools.commands import Run, started

pytestmark = pytest.mark.e2e

PROMPT = list(range(160))


def test_what_live_engines_computed_and_held_is_what_the_audit_reports() -> None:
    with FakeEngine("a") as first, FakeEngine("b") as second:
        first.serve(PROMPT)  # the past: held, and not counted
        auditor = Auditor()
        interrupted = threading.Event()
        with EventStream([worker_of(first), worker_of(second)]) as stream:
            listening = Listening(stream, auditor)
            listening.settle(PATIENCE)
            listening.open()
            listener = threading.Thread(target=listening.listen, args=(PATIENCE, interrupted))
            listener.start()
            second.serve(PROMPT)
            first.serve([*PROMPT, *range(1000, 1032)])
            within(PATIENCE, lambda: auditor.computed, lambda computed: computed >= 192)
            interrupted.set()
            listener.join()
    report = auditor.report(time.time())
    tokens = {rank.rank: rank.tokens for rank in report.ranks}
    assert (tokens["b/0"].computed, tokens["b/0"].other_worker) == (160, 160)
    assert (tokens["a/0"].computed, tokens["a/0"].first) == (32, 32)
    assert all(rank.state == "live" and rank.complete for rank in report.ranks)


def test_a_recorded_fleet_is_audited_as_a_live_one_dp_ranks_of_one_worker_apart(
    tmp_path: Path, run: Run
) -> None:
    with FakeEngine("vllm-0") as zero, FakeEngine("vllm-0", dp_rank=1) as one:
        zero.serve(PROMPT)
        one.serve([*PROMPT, *range(1000, 1032)])
        named = f"vllm-0={zero.endpoint},endpoint={one.endpoint}"
        named += f",replay={zero.replay_endpoint},replay={one.replay_endpoint}"
        auditor = Auditor()
        auditor.begin(0.0)
        with EventStream([parse_worker(named)]) as stream:
            batches: list[RankBatch[EventBatch]] = []
            while len(batches) < 2:
                item = stream.get(PATIENCE)
                batches += [item] if isinstance(item, RankBatch) else []
        for batch in sorted(batches, key=lambda batch: batch.batch.ts):
            auditor.receive(batch, batch.batch.ts)
        run("record", tmp_path / "fleet", "--worker", named, "--replay", "--seconds", 0.01)
    live = auditor.report(time.time())
    paths = [tmp_path / f"fleet-vllm-0-{dp_rank}.frames" for dp_rank in range(2)]
    recorded = run("audit", "--json", "--with-replayed", *paths).json
    assert [rank["rank"] for rank in recorded["ranks"]] == [rank.rank for rank in live.ranks]
    assert recorded["tokens"] == msgspec.to_builtins(live.tokens)
    assert (live.tokens.same_worker, live.tokens.other_worker) == (160, 0)


class BusyStream:
    """A live rank whose next batch comes before anybody has waited long."""

    def __init__(self, live: RankStatus) -> None:
        self.subscriber = self
        self.live = live
        self.looks = 0

    def statuses(self) -> dict[Rank, RankStatus]:
        self.looks += 1
        assert self.looks < 20, "it goes on settling"
        return {self.live.rank: self.live}

    def get(self, timeout: float) -> RankStatus:
        if not timeout:
            raise TimeoutError
        threading.Event().wait(min(timeout, 0.01))
        return self.live


def test_the_window_opens_while_the_engines_are_busy() -> None:
    with FakeEngine("a") as engine, EventStream([worker_of(engine)]) as stream:
        stream.wait_live(PATIENCE)
        live = stream.status(engine.rank)
    Listening(cast("EventStream", BusyStream(live)), Auditor()).settle(PATIENCE)


def test_ctrl_c_ends_the_window_of_engines_asked_over_http_and_still_reports() -> None:
    with FakeEngine("a") as engine, HttpEngine(engine) as http:
        engine.serve(PROMPT)
        with started("audit", "--engine", http.url, "--json") as command:
            assert command.err.readline() == "the window is open: 1 of 1 rank live\n"
            report = command.end().json
    assert report["tokens"]["computed"] == 0
    assert report["duplication"]["unique"] == 160
    assert report["ranks"][0]["model"]


def test_unreachable_engines_are_no_success(run: Run) -> None:
    holder, port = reserve_port("127.0.0.1")
    with holder:
        endpoint = ("--endpoint", f"tcp://127.0.0.1:{port}")
        ran = run("audit", *endpoint, "--settle", 0.1, "--minutes", 0.001, code=1)
    assert "worker-0/0: unreachable" in ran.out
