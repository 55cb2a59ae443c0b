"""What is made of engines that come, go, change and fall silent, without threads or clocks."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from kvindex import PublisherAddress, Worker
from kvindex.subscribe.discovery import DiscoveryError, EngineReport, Target
from kvindex.subscribe.discovery.tracker import MAX_ENGINES, Step, Tracker

pytestmark = pytest.mark.unit

INTERVAL, FORGET_AFTER = 10.0, 100.0


class Fleet:
    """A tracker, whose steps are taken at once, and what was added by them."""

    def __init__(self, *, sources: Iterable[tuple[str, bool]] = (("pods", True),)) -> None:
        self.alive: set[str] = set()
        self.refuses: dict[str, str] = {}
        self.ranks: dict[str, dict[int, str]] = {}
        self.models: dict[str, str] = {}
        self.steps: list[Step] = []
        self.now = 0.0
        self.tracker = Tracker(
            sources,
            interval=INTERVAL,
            forget_after=FORGET_AFTER,
            is_alive=lambda worker: worker in self.alive,
            jitter=lambda: 0.5,
        )

    def listed(self, *targets: Target, source: str = "pods") -> None:
        self.tracker.listed(source, targets, self.now)
        self.take()

    def answer(self, target: Target, *ranks: int, host: str = "10.0.0.1", model: str = "") -> None:
        self.tracker.answered(target, report(target, *ranks, host=host, model=model), self.now)
        self.take()

    def fail(self, target: Target, reason: str = "timeout") -> None:
        error = DiscoveryError(f"{target.url} {reason}", url=target.url, reason=reason)
        self.tracker.answered(target, error, self.now)
        self.take()

    def pass_time(self, seconds: float) -> list[Target]:
        self.now += seconds
        self.tracker.tick(self.now)
        due = self.tracker.due(self.now)
        self.take()
        return due

    def take(self) -> None:
        for step in self.tracker.take_steps():
            worker = step.engine.worker
            refusal = self.refuses.get(worker.name, "") if step.do == "add" else ""
            self.tracker.taken(step, refusal, self.now)
            if refusal:
                continue
            self.steps.append(step)
            if step.do == "add":
                assert worker.name not in self.ranks, "added twice"
                self.ranks[worker.name] = {a.dp_rank: a.endpoint for a in worker.publishers()}
            else:
                del self.ranks[worker.name]
            self.models[worker.name] = step.engine.model


def report(target: Target, *ranks: int, host: str = "10.0.0.1", model: str = "") -> EngineReport:
    addresses = tuple(
        PublisherAddress(rank, f"tcp://{host}:{5557 + rank}", f"tcp://{host}:{5657 + rank}")
        for rank in ranks
    )
    models = (model,) if model else ()
    return EngineReport(target.url, publishes=bool(ranks), ranks=addresses, models=models)


def target(name: str = "pod-0", **options: object) -> Target:
    return Target(name, f"http://{name}:8000", **options)  # type: ignore[arg-type]


POD = target()
A = Target("a", worker=Worker("a", "tcp://10.0.0.1:5557"))


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def one_pod(fleet: Fleet) -> Fleet:
    """A fleet of one pod, which has not answered yet."""
    fleet.listed(POD)
    return fleet


@pytest.fixture
def running(one_pod: Fleet) -> Fleet:
    """A fleet of one pod that has answered with one rank."""
    one_pod.answer(POD, 0)
    return one_pod


def test_an_engine_is_asked_when_it_is_told_of_and_added_when_it_answers(one_pod: Fleet) -> None:
    assert one_pod.pass_time(0.0) == [POD]
    assert one_pod.ranks == {}
    assert one_pod.tracker.missing() == {POD.url: "was not asked yet"}
    one_pod.answer(POD, 0, 1, model="llama")
    assert one_pod.ranks == {"pod-0": {0: "tcp://10.0.0.1:5557", 1: "tcp://10.0.0.1:5558"}}
    assert one_pod.models == {"pod-0": "llama"}
    assert one_pod.tracker.missing() == {}


def test_an_engine_is_asked_again_and_again_but_never_twice_at_a_time(one_pod: Fleet) -> None:
    assert one_pod.pass_time(0.0) == [POD]
    assert one_pod.pass_time(1000.0) == []
    one_pod.answer(POD, 0)
    assert one_pod.tracker.next_at() == one_pod.now + INTERVAL
    assert one_pod.pass_time(INTERVAL - 0.1) == []
    assert one_pod.pass_time(0.1) == [POD]
    one_pod.answer(POD, 0)
    assert len(one_pod.steps) == 1


def test_an_engine_that_its_source_no_longer_tells_of_goes_at_once(fleet: Fleet) -> None:
    fleet.listed(target("a"), target("b"))
    fleet.answer(target("a"), 0)
    fleet.answer(target("b"), 0)
    fleet.listed(target("b"))
    assert set(fleet.ranks) == {"b"}
    fleet.listed()
    assert fleet.ranks == {}


def test_an_answer_that_comes_after_the_engine_has_gone_adds_nothing(one_pod: Fleet) -> None:
    one_pod.pass_time(0.0)
    one_pod.listed()
    one_pod.answer(POD, 0)
    assert one_pod.steps == []


def test_a_name_server_that_forgets_an_engine_does_not_remove_it_at_once() -> None:
    fleet = Fleet(sources=[("dns", False)])
    fleet.listed(POD, source="dns")
    fleet.answer(POD, 0)
    fleet.listed(source="dns")
    fleet.pass_time(FORGET_AFTER - 1)
    assert set(fleet.ranks) == {"pod-0"}
    fleet.listed(POD, source="dns")  # it is back
    fleet.pass_time(FORGET_AFTER)
    assert set(fleet.ranks) == {"pod-0"}
    fleet.listed(source="dns")
    fleet.pass_time(FORGET_AFTER)
    assert fleet.ranks == {}


def test_an_engine_that_does_not_answer_is_kept_for_a_while(
    running: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(8):
        running.pass_time(INTERVAL)
        running.fail(POD)
    assert set(running.ranks) == {"pod-0"}
    assert caplog.text.count("what is known of it is kept") == 1
    running.answer(POD, 0)
    assert "answers again" in caplog.text
    running.fail(POD)
    running.pass_time(FORGET_AFTER)
    assert running.ranks == {}
    assert "removes pod-0 until it answers again, after 100 s" in caplog.text
    assert running.tracker.missing() == {POD.url: "http://pod-0:8000 timeout"}
    running.answer(POD, 0)
    assert set(running.ranks) == {"pod-0"}


def test_an_engine_that_leaves_two_questions_unanswered_is_reported_as_silent(
    running: Fleet,
) -> None:
    silent = []
    for _ in range(3):
        silent.append(running.tracker.reports()["pod-0"].is_silent)
        running.fail(POD)
    running.answer(POD, 0)
    silent.append(running.tracker.reports()["pod-0"].is_silent)
    assert silent == [False, False, True, False]


def test_a_role_that_changes_is_read_with_the_next_report(running: Fleet) -> None:
    pod = target(labels={"llm-d.ai/role": "prefill"})
    running.listed(pod)
    assert running.tracker.reports()["pod-0"].role == ""
    running.answer(pod, 0)
    assert running.tracker.reports()["pod-0"].role == "prefill"
    assert len(running.steps) == 1, "its ranks stay as they are"


def test_a_silent_engine_whose_events_still_come_is_kept(running: Fleet) -> None:
    running.fail(POD)
    running.alive.add("pod-0")
    running.pass_time(10 * FORGET_AFTER)
    assert set(running.ranks) == {"pod-0"}
    running.fail(POD)
    assert running.tracker.next_at() > running.now  # and nobody looks without a pause
    running.alive.clear()
    running.pass_time(INTERVAL)
    assert running.ranks == {}


def test_an_engine_whose_events_are_switched_off_is_kept_for_a_while_too(running: Fleet) -> None:
    running.answer(POD)
    assert set(running.ranks) == {"pod-0"}
    running.pass_time(FORGET_AFTER)
    assert running.ranks == {}


@pytest.mark.parametrize(
    ("ranks", "host"),
    [((0, 1), "10.0.0.2"), ((0, 1, 2), "10.0.0.1"), ((1,), "10.0.0.1"), ((4,), "10.0.0.1")],
    ids=["it moves", "it grows", "it shrinks", "it has another rank"],
)
def test_an_engine_that_changes_is_removed_and_added_as_a_whole(
    one_pod: Fleet, ranks: tuple[int, ...], host: str
) -> None:
    one_pod.answer(POD, 0, 1)
    one_pod.answer(POD, *ranks, host=host)
    assert [step.do for step in one_pod.steps] == ["add", "remove", "add"]
    assert one_pod.ranks == {"pod-0": {rank: f"tcp://{host}:{5557 + rank}" for rank in ranks}}
    assert one_pod.tracker.counters["moved"] == 1
    one_pod.answer(POD, *ranks, host=host)
    assert len(one_pod.steps) == 3


def test_a_pod_that_comes_back_elsewhere_is_asked_at_once(one_pod: Fleet) -> None:
    one_pod.pass_time(0.0)
    one_pod.answer(POD, 0)
    moved = Target("pod-0", "http://10.0.0.9:8000")
    one_pod.listed(moved)
    assert one_pod.pass_time(0.0) == [moved]
    one_pod.answer(POD, 0, 1)  # of the old one, and late
    assert list(one_pod.ranks["pod-0"]) == [0]
    one_pod.answer(moved, 0, host="10.0.0.9")
    assert one_pod.ranks["pod-0"] == {0: "tcp://10.0.0.9:5557"}


def test_what_is_known_of_a_pod_goes_when_another_has_its_name_and_does_not_answer(
    running: Fleet,
) -> None:
    other = target(version="uid-2")
    running.listed(other)
    running.fail(other)
    assert running.ranks == {}


def test_an_answer_without_a_model_moves_nobody(one_pod: Fleet) -> None:
    one_pod.answer(POD, 0, model="llama")
    one_pod.answer(POD, 0)
    assert len(one_pod.steps) == 1
    one_pod.answer(POD, 0, model="qwen")
    assert one_pod.models == {"pod-0": "qwen"}
    assert len(one_pod.steps) == 3


def test_ports_are_assumed_for_an_engine_that_does_not_say_until_it_does(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pod = target(worker=Worker("pod-0", "tcp://10.0.0.1:5557"))
    fleet.listed(pod)
    for _ in range(3):
        fleet.fail(pod, "unsaid")
    assert fleet.ranks == {"pod-0": {0: "tcp://10.0.0.1:5557"}}
    assert caplog.text.count("its usual ports are assumed") == 1
    assert "kept" not in caplog.text
    fleet.pass_time(2 * FORGET_AFTER)
    assert set(fleet.ranks) == {"pod-0"}  # its source still tells of it
    fleet.answer(pod, 0, 1)
    assert len(fleet.ranks["pod-0"]) == 2


def test_ports_are_not_assumed_of_an_engine_that_publishes_nothing(fleet: Fleet) -> None:
    pod = target(worker=Worker("pod-0", "tcp://10.0.0.1:5557"))
    fleet.listed(pod)
    fleet.fail(pod, "off")
    assert fleet.ranks == {}
    assert "off" in fleet.tracker.missing()[pod.url]


def test_an_engine_that_never_answered_is_asked_less_and_less_often(one_pod: Fleet) -> None:
    pauses = []
    for _ in range(6):
        one_pod.fail(POD)
        pauses.append(one_pod.tracker.next_at() - one_pod.now)
    assert pauses == [1, 2, 4, 8, INTERVAL, INTERVAL]


def test_a_worker_that_is_told_whole_is_added_without_a_question(fleet: Fleet) -> None:
    fleet.listed(A)
    assert set(fleet.ranks) == {"a"}
    assert fleet.pass_time(1e6) == []
    changed = Target("a", worker=Worker("a", "tcp://10.0.0.1:5557", dp_size=2, topic="kv"))
    fleet.listed(changed)
    assert sorted(fleet.ranks["a"]) == [0, 1]
    assert [step.do for step in fleet.steps] == ["add", "remove", "add"]


def test_a_worker_that_is_refused_is_tried_again(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.refuses["a"] = "the port is taken"
    fleet.listed(A)
    for _ in range(3):
        fleet.pass_time(INTERVAL)
    assert fleet.tracker.missing() == {"a": "cannot be added: the port is taken"}
    assert caplog.text.count("the port is taken") == 1
    fleet.refuses.clear()
    fleet.pass_time(INTERVAL)
    assert set(fleet.ranks) == {"a"}
    assert fleet.tracker.missing() == {}


def test_a_changed_engine_that_is_refused_is_tried_again(running: Fleet) -> None:
    running.refuses["pod-0"] = "no"
    running.answer(POD, 0, 1)
    running.refuses.clear()
    running.answer(POD, 0, 1)
    assert sorted(running.ranks["pod-0"]) == [0, 1]


def test_a_source_that_fails_takes_nobody_away_and_is_told_of_once(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    assert fleet.tracker.missing() == {"pods": "has not listed its engines yet"}
    fleet.tracker.source_failed("pods", "no such file")
    assert fleet.tracker.missing() == {"pods": "no such file"}
    fleet.listed(A)
    for _ in range(3):
        fleet.tracker.source_failed("pods", "it is gone")
    assert caplog.text.count("it is gone; 1 engines known from it are kept") == 1
    assert set(fleet.ranks) == {"a"}
    assert fleet.tracker.statistics(0.0)["sources"]["pods"] == {
        "engines": 1,
        "reports": 1,
        "failures": 4,
        "error": "it is gone",
    }


def test_a_name_belongs_to_the_first_source_that_tells_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet(sources=[("file", True), ("pods", True)])
    theirs = Target("a", worker=Worker("a", "tcp://10.0.0.2:5557"))
    fleet.listed(theirs)
    fleet.listed(A, source="file")
    assert fleet.ranks["a"] == {0: "tcp://10.0.0.1:5557"}
    fleet.listed(theirs)
    assert caplog.text.count("pods a is left out: file lists that name already") == 1
    assert fleet.tracker.statistics(0.0)["counters"]["refused"] == 1
    fleet.listed(source="file")
    assert fleet.ranks["a"] == {0: "tcp://10.0.0.2:5557"}


def test_engines_beyond_the_limit_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    fleet.listed(*(target(f"pod-{n}") for n in range(MAX_ENGINES + 5)))
    assert len(fleet.pass_time(0.0)) == MAX_ENGINES
    assert f"more than {MAX_ENGINES} engines" in caplog.text


def test_a_report_that_names_other_hosts_says_so_once(
    one_pod: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    noted = EngineReport(
        POD.url,
        publishes=True,
        ranks=(PublisherAddress(0, "tcp://10.9.9.9:1", None),),
        notes=("rank 0: another host",),
    )
    for _ in range(3):
        one_pod.tracker.answered(POD, noted, one_pod.now)
    assert caplog.text.count("rank 0: another host") == 1


def test_a_model_that_is_listed_as_new_at_each_answer_changes_no_report(one_pod: Fleet) -> None:
    one_pod.answer(POD, 0, model="m")
    for created in (1, 2):
        card = {"id": "m", "created": created, "max_model_len": 9}
        noted = replace(report(POD, 0, model="m"), listed={"m": card})
        one_pod.tracker.answered(POD, noted, one_pod.now)
        assert one_pod.tracker.reports()["pod-0"].listed == {"m": {**card, "created": 1}}
