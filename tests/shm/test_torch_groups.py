"""Groups of torch.distributed: real CPU ranks over gloo. Collected only where torch is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shm.group_ranks import (
    barrier_when_told,
    barrier_without_rank_0,
    every_collective,
    expected_collectives,
    too_large,
    torch_ranks,
)

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("members", [[0, 1, 2], [1, 2]])
def test_ranks_are_those_within_the_group_and_others_are_refused(
    tmp_path: Path, members: list[int]
) -> None:
    backend = "cpu:gloo,cuda:gloo"
    with torch_ranks(3, every_collective, f"{tmp_path}/store", backend, members) as ranks:
        for rank, result in enumerate(ranks.receive_all()):
            if rank in members:
                assert result == expected_collectives(len(members))
            else:
                assert result == ("ConfigurationError", "this process is not a member of the group")


def test_a_killed_torch_rank_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    with torch_ranks(2, barrier_when_told, f"{tmp_path}/store", "gloo", [0, 1]) as ranks:
        ranks.receive_all()
        ranks.kill(1)
        ranks.pipes[0].send("go on")
        name, text = ranks.receive(0)
        assert name == "PeerDiedError"
        assert "rank 0 failed in barrier()" in text


def test_a_torch_rank_that_stays_away_is_a_timeout(tmp_path: Path) -> None:
    with torch_ranks(3, barrier_without_rank_0, f"{tmp_path}/store", "gloo", [0, 1]) as ranks:
        name, text = ranks.receive(1)
        assert name == "QueueTimeoutError"
        assert "rank 1 failed in barrier() after 2" in text
        ranks.pipes[0].send("done")


def test_a_length_beyond_the_limit_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    with torch_ranks(3, too_large, f"{tmp_path}/store", "gloo", [1, 2]) as ranks:
        name, text = ranks.receive(2)
        assert name == "DecodeError"
        assert "rank 0 announced a value of 503 bytes, not of 1 to 100" in text
