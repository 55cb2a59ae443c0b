"""`kvindex serve --processes`: children that die, a parent that dies, and what is passed on."""

from __future__ import annotations

import http.client
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from kvindex import Client, Worker
from kvindex.service.catalog import Catalog, Partition, Registration
from kvindex.service.child import ReplicaService, child_site
from kvindex.service.http.guards import Guard
from kvindex.service.http.site import Site
from kvindex.service.proxy import Proxy
from tests.live import PATIENCE, until
from tests.native_ring import needs_ring
from tests.service.http.in_process import Asker, request
from tests.service.http.listening import listening_on
from tests.service.http.served import BLOCK, Served, engine, matched, register, serving

pytestmark = [pytest.mark.service, needs_ring]

PROMPT = list(range(3 * BLOCK))
QUERY = {"token_ids": PROMPT, "model_name": "m"}


def answering(served: Served, count: int) -> list[int]:
    """Wait until so many processes run; return their ids."""
    return until(served.children, lambda pids: len(pids) == count)


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def state_of(pid: int) -> str:
    """Return a process's state as the kernel writes it, "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@contextmanager
def alone(served: Served, process: int) -> Iterator[None]:
    """Have one process take every new connection: the others are stopped."""
    others = [pid for pid in served.children() if pid != process]
    try:
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: [pid for pid in others if state_of(pid) != "T"], lambda left: not left)
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


def test_a_killed_child_is_started_again_and_others_answer_meanwhile() -> None:
    with serving("--processes", 2) as served, engine() as first:
        register(served, first)
        first.serve(PROMPT)
        until(lambda: matched(served, PROMPT) == len(PROMPT))
        before = answering(served, 2)
        os.kill(before[0], signal.SIGKILL)
        until(lambda: "".join(served.said), lambda said: "signal 9" in said)
        for _ in range(20):  # whoever takes the connection
            assert matched(served, PROMPT) == len(PROMPT)
        after = until(served.children, lambda pids: len(pids) == 2 and before[0] not in pids)
        assert before[1] in after


def test_children_end_when_their_parent_is_killed() -> None:
    with serving("--processes", 2) as served:
        assert served.get("/workers").status == 200
        children = answering(served, 2)
        served.process.kill()
        until(lambda: [pid for pid in children if is_running(pid)], lambda left: not left)


def test_the_private_directory_is_gone_after_the_end(tmp_path: Path) -> None:
    with serving("--processes", 2, env={"TMPDIR": str(tmp_path)}) as served:
        assert served.get("/health").status == 200
        (made,) = tmp_path.iterdir()
        assert made.stat().st_mode & 0o077 == 0
        assert served.end() == 0
    assert not list(tmp_path.iterdir())


def test_the_traffic_over_time_adds_up_what_each_process_was_asked() -> None:
    routed = {"model_name": "m", "asked": 12, "attainable": 8, "chosen": 8, "delivered": 4}
    best: list[int] = []  # of each query

    with serving("--processes", 2) as served, engine() as first:

        def ask() -> int:
            instances = served.post("/query", QUERY).json["instances"]
            best.append(instances.get("1", {}).get("longest_matched", 0))
            return best[-1]

        def sums() -> dict[str, int]:
            points = served.get("/api/traffic?seconds=3600").json["points"]
            return {name: sum(points[name]) for name in expected}

        assert register(served, first).status == 201
        first.serve(PROMPT)
        for pid, more in zip(answering(served, 2), (2, 4), strict=True):
            with alone(served, pid):
                until(ask, lambda tokens: tokens == len(PROMPT))
                for _ in range(more):
                    ask()
                assert served.post("/outcomes", routed).status == 200
        expected = {
            "queries": len(best),
            "tokens": len(best) * len(PROMPT),
            "best_match": sum(best),
            "requests": 2,
            "asked": 24,
            "attainable": 16,
            "chosen": 16,
            "reported": 24,
            "delivered": 8,
        }
        until(sums, lambda values: values == expected)


def test_all_processes_know_of_a_registration_that_was_answered() -> None:
    with serving("--processes", 2) as served, engine() as first:
        answering(served, 2)
        assert register(served, first).status == 201
        for _ in range(20):
            assert matched(served, PROMPT) >= 0  # not 404, whoever answers


def test_each_process_hears_who_comes_and_who_goes() -> None:
    with serving("--processes", 2) as served, ExitStack() as opened:
        engines = [opened.enter_context(engine(str(n))) for n in (1, 2, 3)]

        def listed() -> set[str]:
            return set(served.post("/query", QUERY).json["instances"])

        def each_lists(*names: str) -> None:
            for pid in answering(served, 2):
                with alone(served, pid):
                    until(listed, lambda values: values == set(names))

        for each in engines:
            each.serve(PROMPT)
            assert register(served, each).status == 201
        each_lists("1", "2", "3")
        for instance in (1, 3):
            gone = served.post("/unregister", {"instance_id": instance, "model_name": "m"})
            assert gone.status == 200
        each_lists("2")
        assert register(served, engines[2]).status == 201
        each_lists("2", "3")


def test_a_kept_connection_carries_queries_and_what_is_passed_on() -> None:
    with serving("--processes", 2) as served, engine() as first:
        register(served, first)
        kept = served.connection()
        for _ in range(10):
            assert served.ask("GET", "/workers", via=kept).json[0]["instance_id"] == 1
            assert served.ask("POST", "/query", QUERY, via=kept).status == 200
            assert served.ask("GET", "/nowhere", via=kept).status == 404
            assert served.ask("HEAD", "/workers", via=kept).body == b""
        kept.close()


def test_a_snapshot_streams_through_a_child() -> None:
    with serving("--processes", 2) as served, engine() as first:
        register(served, first)
        first.serve(PROMPT)
        until(lambda: matched(served, PROMPT) == len(PROMPT))
        answer = until(lambda: served.get("/snapshot"), lambda got: got.status == 200)
        assert int(answer.headers["content-length"]) == len(answer.body) > 0


async def test_a_partition_that_a_child_does_not_know_is_left_to_the_parent_in_every_dialect() -> (
    None
):
    with Client(Worker("1", "inproc://nobody-publishes-here")) as client:
        service = ReplicaService(client)
        guard = Guard()
        site = child_site(service, guard, Proxy("/nowhere", guard))
        tokens = {"token_ids": [1, 2, 3, 4]}
        packed = msgspec.msgpack.encode({**tokens, "model": "m"})
        requests = [
            request("POST", "/query", {**tokens, "model_name": "m"}),
            request("POST", "/query", {**tokens, "model": "m"}),
            request("POST", "/query", packed, content_type="application/msgpack"),
            request(
                *("POST", "/query?model_name=m", bytes(16)),
                content_type="application/octet-stream",
            ),
        ]

        async def statuses() -> list[int]:
            return [(await Asker(site).answer(question)).status_code for question in requests]

        assert await statuses() == [503] * 4  # the parent is nowhere
        assert guard.counters.values()["parent"] == 4
        entry = Registration(instance_id=1, partition=Partition("m"), endpoint="tcp://h:1")
        service._registry = None  # as with a replica, whose registrations the parent sends
        service.follow(Catalog([entry]))
        assert await statuses() == [200, 200, 400, 200]  # the conductor's has no block_size
        assert guard.counters.values()["parent"] == 4


def test_a_response_that_breaks_off_behind_a_child_ends_the_connection_without_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def break_off(upstream: socket.socket) -> None:
        taken, _ = upstream.accept()
        with taken:
            taken.recv(4096)
            taken.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")

    path = str(tmp_path / "http")
    guard = Guard()
    with socket.socket(socket.AF_UNIX) as upstream:
        upstream.bind(path)
        upstream.listen()
        threading.Thread(target=break_off, args=(upstream,), daemon=True).start()
        with listening_on(Site([], guard, otherwise=Proxy(path, guard))) as port:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            client.request("GET", "/events")
            with pytest.raises((http.client.HTTPException, OSError)):
                client.getresponse().read()
            client.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
