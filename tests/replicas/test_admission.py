"""Who may serve and join at a path, and with which settings; and what forked children inherit."""

from __future__ import annotations

import gc
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from kvindex import BACKEND, ClosedError, ConfigurationError, State
from kvindex.replicas import FanOut, Replica, join
from kvindex.wire.errors import QueueTimeoutError
from kvindex.wire.forks import FORKED
from tests.children import ENVIRONMENT, Program, in_child
from tests.live import PATIENCE, caught_up, until, worker_of
from tests.native_ring import needs_ring
from tests.replicas.fanout_peers import BEFORE, PROMPTS, Site, fan_out
from tests.shm.queue_peers import Running

pytestmark = [pytest.mark.e2e, needs_ring]


def test_there_is_nobody_to_join(site: Site) -> None:
    with pytest.raises(QueueTimeoutError, match=r"no_server.*No such file") as caught:
        join(site.path, timeout=0.2)
    assert isinstance(caught.value, TimeoutError)


def test_a_server_that_comes_later_is_waited_for(site: Site) -> None:
    waiting = Running(lambda: join(site.path, PATIENCE))
    site.serve()
    assert waiting.finish() is None
    waiting.returned.close()


def test_a_process_for_which_there_is_no_place_gets_the_reason(site: Site) -> None:
    fanout = site.serve(max_replicas=1)
    replica = site.join()

    def refused() -> bool:
        with pytest.raises(QueueTimeoutError) as raised:
            join(site.path, timeout=0.3)
        return "max_replicas" in str(raised.value)

    assert until(refused)
    assert fanout.statistics()["turned_away"]["full"] > 0
    replica.close()
    site.join()  # the place is free again


def test_the_socket_is_private_and_belongs_to_one_server(site: Site, tmp_path: Path) -> None:
    site.serve()
    assert stat.S_IMODE(os.stat(site.path).st_mode) == 0o600
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "file").write_text("precious")
    for path, reason in (
        (site.path, "living server"),
        (str(tmp_path / "shared" / "socket"), "others may write"),
        (str(tmp_path / "none" / "socket"), "no directory"),
        (str(tmp_path / ("x" * 120)), "too long"),
        (str(tmp_path / "file"), "is no socket"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            fan_out(path)
    assert (tmp_path / "file").read_text() == "precious"
    site.join()  # the first server is as it was


@pytest.mark.parametrize(
    "option", [{"patience": 0.0}, {"max_replicas": 0}, {"replay_policy": 3}], ids=str
)
def test_a_setting_that_cannot_work_is_refused_and_leaves_nothing(
    site: Site, option: dict[str, Any]
) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigurationError):
        FanOut((), site.path, **option)
    assert not Path(site.path).exists()
    assert threading.active_count() == before


@pytest.mark.parametrize("option", [{"timeout": 0}, {"stale_after": -1.0}, {"buffer_bytes": 0}])
def test_a_joiners_setting_that_cannot_work_is_refused(site: Site, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        join(site.path, **option)


def test_connections_that_come_while_it_closes_are_closed(site: Site) -> None:
    for _ in range(30):
        with FanOut((), site.path):
            coming = [socket.socket(socket.AF_UNIX) for _ in range(3)]
            for connection in coming:
                connection.connect(site.path)
        for connection in coming:
            connection.close()
    gc.collect()  # an open socket warns when it goes, and a warning is an error


def test_the_other_kind_of_index_is_refused_with_what_to_do(site: Site) -> None:
    script = f"from kvindex.replicas import join; join({site.path!r})"
    site.serve()
    env = {**ENVIRONMENT, "KVINDEX_BACKEND": "python"}
    with Program("-c", script, env=env) as joining:
        _, err = joining.finish()
    assert "ConfigurationError" in err
    assert f"KVINDEX_BACKEND={BACKEND}" in err


# Forked children ---------------------------------------------------------------------------------


def test_a_replica_from_before_a_fork_refuses_in_the_child_and_follows_in_the_parent(
    site: Site,
) -> None:
    a = site.engine()
    a.run(BEFORE)
    client = site.serve(worker_of(a)).client
    caught_up(client, a)
    replica: Replica = site.join()

    def child() -> None:
        assert replica.trusts()[a.rank].state is State.CLOSED
        assert replica.trouble == FORKED
        with pytest.raises(ClosedError, match=FORKED):
            replica.match(PROMPTS[0])
        replica.close()

    assert in_child(child) == 0
    assert replica.match(PROMPTS[0])
    assert replica.statistics()["replica"]["joins"] == 1


def test_a_forked_child_is_no_server_and_keeps_no_place(site: Site) -> None:
    fanout = site.serve()
    assert in_child(fanout.close) == 0  # as a `with` that the child leaves would
    assert site.join().ranks == ()
