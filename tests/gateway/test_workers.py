"""`kvindex gateway --workers`: several proxies, one router process; any of them may be killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvindex.testing import HttpFaults
from tests.gateway.test_gateway import LONG, Gateway, chat, gateway, live_ranks
from tests.live import until

pytestmark = pytest.mark.service


def children_of(served: Gateway) -> dict[str, int]:
    """The gateway's processes by their part: process ids."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=", "-o", "args=", "--ppid", str(served.process.process.pid)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.findall(r"^ *(\d+) .*--part (\w+):", listed.stdout, re.MULTILINE)
    parts = [part for _, part in found]
    names = (f"{part}-{parts[:at].count(part)}" for at, part in enumerate(parts))
    return dict(zip(names, (int(pid) for pid, _ in found), strict=True))


@pytest.fixture
def served() -> Iterator[Gateway]:
    with gateway("--workers", "2") as served:
        until(lambda: live_ranks(served) == 4)
        yield served
        until(lambda: served.bookings()["open"] == 0)


def test_all_proxies_find_what_one_has_sent(served: Gateway) -> None:
    def cached() -> int:
        status, body = served.ask("/v1/chat/completions", chat())
        assert status == 200
        details: dict[str, int] = json.loads(body)["usage"]["prompt_tokens_details"] or {}
        return details.get("cached_tokens", 0)

    until(lambda: cached() > 0)
    assert min(cached() for _ in range(16)) > 0
    until(lambda: sum(row[-1] for row in served.statistics()["requests"]) >= 17)


def test_errors_of_the_router_process_are_those_of_one_process(served: Gateway) -> None:
    status, body = served.ask("/v1/chat/completions", {"model": "x", "messages": [{}]})
    assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
    assert served.ask("/admin/drain?worker=z", {})[0] == 404
    for engine in served.engines:
        name = engine.url.removeprefix("http://")
        assert served.ask(f"/admin/drain?worker={name}", {})[0] == 200
    status, body = served.ask("/v1/chat/completions", chat())
    assert (status, json.loads(body)["error"]["code"]) == (503, "no_rank")
    assert b"4 drained" in body
    for engine in served.engines:
        name = engine.url.removeprefix("http://")
        assert served.ask(f"/admin/undrain?worker={name}", {})[0] == 200
    assert served.ask("/v1/chat/completions", chat())[0] == 200
    # What the other proxy has counted comes within a second.
    until(lambda: b"kvindex_gateway_requests_total{" in served.ask("/metrics")[1])


def test_when_the_router_process_is_killed_requests_go_on_and_their_load_is_booked_again(
    served: Gateway,
) -> None:
    gaps = [0.02, 0.02, 0.02, 600.0, 600.0, 600.0]  # seconds between tokens
    opened = [
        served.open(
            "/v1/chat/completions",
            chat(f"{number} {LONG}", stream=True, max_tokens=200),
            x_fake_faults=json.dumps({"gap": gap}),
        )
        for number, gap in enumerate(gaps)
    ]
    for _, response in opened:
        assert response.read(6) == b"data: "
    until(lambda: served.bookings()["open"] >= 3)
    os.kill(children_of(served)["router-0"], signal.SIGKILL)
    assert served.ask("/v1/chat/completions", chat("meanwhile", max_tokens=1))[0] == 200
    for _, response in opened[:3]:
        assert response.read().endswith(b"data: [DONE]\n\n")
    until(lambda: served.ask("/admin/statistics")[0] == 200)
    until(lambda: served.bookings()["open"] == 3)
    until(lambda: served.statistics()["routing"]["lost"] >= 1)
    for connection, _ in opened:
        connection.close()


def test_when_a_proxy_is_killed_its_bookings_end_and_it_is_started_again(served: Gateway) -> None:
    for engine in served.engines:
        engine.faults = HttpFaults(gap=60.0)
    before = children_of(served)
    opened = [served.open("/v1/chat/completions", chat(stream=True)) for _ in range(4)]
    for _, response in opened:
        assert response.read(6) == b"data: "
    for name in ("proxy-0", "proxy-1"):
        os.kill(before[name], signal.SIGKILL)

    def bookings() -> int:
        try:
            status, body = served.ask("/admin/statistics")
        except OSError:
            return -1
        if status != 200:
            return -1
        read: dict[str, Any] = json.loads(body)
        return int(read["routers"]["fake-model"]["bookings"]["open"])

    until(lambda: bookings() == 0)
    for connection, _ in opened:
        connection.close()
    after = children_of(served)
    assert after.keys() == before.keys()
    assert after["router-0"] == before["router-0"]
    for engine in served.engines:
        engine.faults = HttpFaults()
    until(lambda: served.ask("/v1/chat/completions", chat())[0] == 200)


def test_a_signal_lets_streams_end_and_leaves_no_process(tmp_path: Path) -> None:
    with gateway("--workers", "2", ranks=1) as served:
        until(lambda: served.ask("/admin/statistics")[0] == 200)
        for engine in served.engines:
            engine.faults = HttpFaults(gap=0.05)
        pids = children_of(served).values()
        connection, response = served.open("/v1/chat/completions", chat("drain", stream=True))
        assert response.read(6) == b"data: "
        served.process.process.send_signal(signal.SIGTERM)
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        assert served.process.process.wait(120) == 0
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_when_the_parent_is_killed_its_processes_end() -> None:
    with gateway("--workers", "2", ranks=1) as served:
        until(lambda: served.ask("/admin/statistics")[0] == 200)
        pids = children_of(served).values()
        assert len(pids) == 3
        served.process.process.kill()
        until(lambda: not [pid for pid in pids if running(pid)])


def running(pid: int) -> bool:
    """Whether a process is there, and no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
