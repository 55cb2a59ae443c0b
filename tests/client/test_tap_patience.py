"""A tap that is patient receives batches together; nothing is late where it matters."""

from __future__ import annotations

import sys

import pytest

from kvindex import BACKEND, Client
from kvindex.testing import FakeEngine
from tests.client.conftest import NotingTap
from tests.live import caught_up, resident, truth, until, worker_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(BACKEND != "native", reason="lanes need the native index"),
    pytest.mark.skipif(sys.platform != "linux", reason="lanes need Linux"),
]


@pytest.mark.parametrize("patience", [0.0, 0.01, 3600.0])
def test_a_tap_waits_for_batches_as_long_as_it_allows_and_a_call_finds_all_of_them(
    patience: float,
) -> None:
    tap = NotingTap(patience)
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
