"""A tap that is patient receives batches together; nothing is late where it matters."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from kvindex import BACKEND, Client, Rank, RankStatus
from kvindex.subscribe import StreamItem
from kvindex.testing import FakeEngine
from tests.live import caught_up, resident, truth, until, worker_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(BACKEND != "native", reason="lanes need the native index"),
    pytest.mark.skipif(sys.platform != "linux", reason="lanes need Linux"),
]


class CountingTap:
    """A tap that counts batches, and may wait for them."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.batches = 0

    def batch(self, rank: Rank, payload: bytes) -> None:
        self.batches += 1

    def item(self, item: StreamItem) -> None: ...

    def restored(self, rank: Rank, section: bytes) -> None: ...

    def statuses(self, statuses: Sequence[RankStatus]) -> None: ...


@pytest.mark.parametrize("patience", [0.0, 0.01, 3600.0])
def test_a_tap_waits_for_batches_as_long_as_it_allows_and_a_call_finds_all_of_them(
    patience: float,
) -> None:
    tap = CountingTap(patience)
    with FakeEngine() as engine, Client(worker_of(engine), tap=tap) as client:
        engine.serve(range(64))
        caught_up(client, engine)
        assert tap.batches == 1
        for start in range(1, 6):
            engine.serve(range(1000 * start, 1000 * start + 64))
        until(lambda: resident(client, engine.rank), lambda held: held == truth(engine))
        if patience < 60.0:
            until(lambda: tap.batches, lambda batches: batches == 6)
        else:
            assert tap.batches == 1
        assert client.subscriber.call(lambda: tap.batches) == 6
        caught_up(client, engine)
