"""Workers that fail are left out for a while, whatever their caches hold."""

from __future__ import annotations

import pytest

from kvindex import ConfigurationError, Rank
from kvindex.routing import Capacity, Ejection, NoCandidateError, Router
from tests.routing.fleet import PROMPT, A, B, router_of

pytestmark = pytest.mark.unit


class Fleet:
    """A router over workers of which "a" holds the prompt, and the clock of its ejection."""

    def __init__(self, *workers: str, **options: int) -> None:
        self.now = 100.0
        self.ejection = Ejection(clock=lambda: self.now)
        filters = [self.ejection, *([Capacity(**options)] if options else [])]
        held = {worker: 9 if worker == "a" else 0 for worker in workers or ("a", "b")}
        self.router: Router = router_of(held, filters=filters)

    def chosen(self) -> Rank:
        return self.router.select(PROMPT).rank

    def ejected(self) -> dict[str, float]:
        """The workers that are left out, and for how many seconds."""
        workers = {rank.worker for rank in self.router.ranks}
        ejected = self.ejection.statistics(workers)["ejected"]
        return {worker: one["seconds"] for worker, one in ejected.items()}

    def fail(self, worker: str = "a", times: int = 3) -> None:
        for _ in range(times):
            self.ejection.failed(worker, reason="status_500")


def test_the_third_failure_in_a_row_ejects_a_worker() -> None:
    fleet = Fleet()
    fleet.fail(times=2)
    assert fleet.chosen() == A
    fleet.ejection.succeeded("a")
    fleet.fail(times=2)
    assert fleet.chosen() == A, "they were not in a row"
    fleet.fail(times=1)
    assert fleet.chosen() == B
    assert fleet.router.statistics()["refused"] == {"ejected": 1}
    told = {"seconds": 5.0, "failures": 3, "reason": "status_500"}
    assert fleet.ejection.statistics("ab") == {"ejections": 1, "ejected": {"a": told}}


def test_a_worker_that_cannot_be_connected_to_is_ejected_at_once() -> None:
    fleet = Fleet()
    fleet.ejection.failed("a", is_down=True)
    assert fleet.chosen() == B


def test_one_request_tries_a_worker_whose_time_is_over_and_each_failure_doubles_it() -> None:
    fleet = Fleet()
    fleet.fail()
    for seconds in (5.0, 10.0, 20.0, 40.0, 60.0, 60.0):
        fleet.now += seconds - 0.1
        assert fleet.chosen() == B
        fleet.now += 0.2
        assert fleet.chosen() == A
        fleet.ejection.sent("a")
        assert fleet.chosen() == B, "nobody else tries it"
        fleet.ejection.failed("a")
        assert fleet.chosen() == B
    fleet.now += 61
    fleet.ejection.sent("a")
    fleet.ejection.succeeded("a")
    assert fleet.chosen() == A
    fleet.fail()
    assert fleet.ejected() == {"a": 5.0}, "it begins anew"


def test_a_try_of_which_nothing_is_heard_is_made_again() -> None:
    fleet = Fleet()
    fleet.fail()
    fleet.now += 6
    fleet.ejection.sent("a")
    assert fleet.chosen() == B
    fleet.now += 6
    assert fleet.chosen() == A


def test_failures_of_requests_that_were_sent_before_do_not_lengthen_the_time() -> None:
    fleet = Fleet()
    fleet.fail(times=50)
    assert fleet.ejected() == {"a": 5.0}


@pytest.mark.parametrize(("workers", "out"), [("ab", 1), ("abc", 1), ("abcd", 2), ("abcde", 2)])
def test_at_most_half_of_the_workers_are_ejected_the_first_ones(workers: str, out: int) -> None:
    fleet = Fleet(*workers)
    for worker in reversed(workers):
        fleet.fail(worker)
    left = set()
    for _ in workers:
        booking = fleet.router.reserve(list(range(5000, 5100)))
        left.add(booking.rank.worker)
    assert left == set(workers[: len(workers) - out])
    assert set(fleet.ejected()) == set(workers) - left, "what is told is what is done"


def test_a_worker_that_fails_is_better_than_none_but_not_than_one_that_is_full() -> None:
    fleet = Fleet(open_requests=1)
    fleet.fail()
    assert fleet.router.select(PROMPT, exclude="b").rank == A
    fleet.router.drain("b")
    assert fleet.chosen() == A
    fleet.router.undrain("b")
    assert fleet.router.reserve(PROMPT).rank == B
    with pytest.raises(NoCandidateError) as caught:
        fleet.router.select(PROMPT)
    assert caught.value.refused == {"ejected": 1, "capacity": 1}


def test_a_pool_with_one_worker_never_ejects_it() -> None:
    fleet = Fleet("a")
    fleet.fail(times=10)
    assert fleet.chosen() == A


def test_what_is_remembered_of_workers_is_bounded() -> None:
    ejection = Ejection()
    workers = [str(number) for number in range(10_000)]
    for worker in workers:
        ejection.failed(worker, is_down=True)
    assert len(ejection.statistics(workers)["ejected"]) <= 4096


@pytest.mark.parametrize("seconds", [0, -1, 61, float("nan"), float("inf")])
def test_seconds_that_cannot_work_are_refused(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="seconds"):
        Ejection(seconds=seconds)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_cannot_be_one_is_refused(share: float) -> None:
    with pytest.raises(ConfigurationError, match="share"):
        Ejection(share=share)


def test_a_worker_that_begins_to_answer_and_breaks_off_each_time_stays_out() -> None:
    fleet = Fleet()
    for _ in range(3):
        fleet.ejection.begun("a")
        fleet.fail(times=1)
    assert fleet.chosen() == B
    fleet.ejection.succeeded("a")
    assert fleet.chosen() == B, "a request that was sent before has ended well"
    fleet.now += 5
    fleet.ejection.sent("a")
    assert fleet.chosen() == B, "nobody else tries it"
    fleet.ejection.begun("a")
    assert fleet.chosen() == A
    fleet.fail(times=1)
    assert fleet.chosen() == B


def test_requests_that_were_sent_before_an_ejection_do_not_judge_the_try() -> None:
    fleet = Fleet()
    before = [fleet.ejection.sent("a") for _ in range(3)]
    fleet.fail()
    for seconds in (5.0, 10.0, 20.0):
        fleet.now += seconds
        tried = fleet.ejection.sent("a")
        fleet.ejection.begun("a", before[0])
        fleet.ejection.succeeded("a", before[1])
        fleet.ejection.failed("a", before[2], is_down=True)
        assert fleet.chosen() == B, "the try is still under way"
        fleet.ejection.failed("a", tried)
        assert fleet.ejected() == {"a": 2 * seconds}


def test_a_worker_whose_try_has_begun_to_answer_is_open_to_all_until_one_fails() -> None:
    fleet = Fleet()
    fleet.fail()
    fleet.now += 5
    tried = fleet.ejection.sent("a")
    fleet.ejection.begun("a", tried)
    others = [fleet.ejection.sent("a") for _ in range(3)]
    assert (fleet.chosen(), fleet.ejected()) == (A, {})
    fleet.ejection.failed("a", others[0])
    assert fleet.ejected() == {"a": 10.0}
    fleet.ejection.succeeded("a", tried)
    assert fleet.chosen() == B, "it was sent before"


def test_a_request_that_went_to_an_ejected_worker_for_want_of_others_opens_it() -> None:
    fleet = Fleet()
    fleet.fail()
    sent = fleet.ejection.sent("a")
    fleet.ejection.succeeded("a", sent)
    assert fleet.chosen() == A
