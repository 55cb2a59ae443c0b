"""Answers as JSON: each dialect's own counts, and how far they can be trusted."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Mapping
from typing import Any

import pytest

from kvindex import (
    BlockStored,
    ConfigurationError,
    EventBatch,
    Hits,
    Index,
    Match,
    Rank,
    State,
    Trust,
)
from kvindex.service.queries import AnswerForm

pytestmark = pytest.mark.unit

PROMPT = list(range(16))
A0, A1, B0, C0 = Rank("a", 0), Rank("a", 1), Rank("b", 0), Rank("c", 0)
INSTANCES: list[tuple[int | str, list[Rank]]] = [(1, [A0, A1]), ("b", [B0]), (3, [C0])]
LIVE = Trust(State.LIVE, True, 0)


def store(index: Index, rank: Rank, medium: str, blocks: range) -> None:
    stored = BlockStored(
        block_hashes=list(blocks),
        parent_block_hash=blocks.start - 1 if blocks.start else None,
        token_ids=PROMPT[4 * blocks.start : 4 * blocks.stop],
        block_size=4,
        medium=medium,
    )
    index.apply(rank, EventBatch(ts=0.0, events=[stored]))


@pytest.fixture
def match() -> Match:
    """a/0: three blocks on the device, all four on the host. a/1: one. b: two, then one on disk."""
    index = Index()
    store(index, A0, "GPU", range(3))
    store(index, A0, "CPU", range(4))
    store(index, A1, "GPU", range(1))
    store(index, B0, "GPU", range(2))
    store(index, B0, "DISK", range(3))
    index.add(C0)
    return index.match(PROMPT)


def written(
    match: Match | Hits, dialect: str, trusts: Mapping[Rank, Trust] | None = None
) -> dict[str, Any]:
    answer = json.loads(AnswerForm(INSTANCES, dialect).write(match, trusts))
    assert isinstance(answer, dict)
    return answer


def test_dynamo_gets_scores_of_the_device_and_tiers_that_add_up(match: Match) -> None:
    assert written(match, "dynamo") == {
        "scores": {"1": {"0": 12, "1": 4}, "b": {"0": 8}},
        "frequencies": [],
        "instances": {
            "1": {"longest_matched": 16, "gpu": 12, "dp": {"0": 12, "1": 4}, "cpu": 16, "disk": 16},
            "b": {"longest_matched": 12, "gpu": 8, "dp": {"0": 8}, "cpu": 8, "disk": 12},
        },
    }


def test_the_rfc_gets_its_tenant_and_all_that_a_rank_holds(match: Match) -> None:
    assert written(match, "rfc") == {
        "default": {
            "1": {"longest_matched": 16, "GPU": 12, "DP": {"0": 16, "1": 4}, "CPU": 16, "DISK": 16},
            "b": {"longest_matched": 12, "GPU": 8, "DP": {"0": 12}, "CPU": 8, "DISK": 12},
        }
    }
    form = AnswerForm(INSTANCES, "rfc", tenant='acme "x"')
    assert list(json.loads(form.write(match, None))) == ['acme "x"']


def test_a_rank_whose_device_holds_nothing_has_no_score() -> None:
    index = Index()
    store(index, A0, "CPU", range(2))
    index.add(A1)
    assert written(index.match(PROMPT), "dynamo") == {
        "scores": {},
        "frequencies": [],
        "instances": {
            "1": {"longest_matched": 8, "gpu": 0, "dp": {"0": 0}, "cpu": 8, "disk": 8},
        },
    }


@pytest.mark.parametrize(
    ("dialect", "empty"),
    [
        ("dynamo", {"scores": {}, "frequencies": [], "instances": {}}),
        ("rfc", {"default": {}}),
    ],
)
def test_who_holds_nothing_is_absent(match: Match, dialect: str, empty: object) -> None:
    assert written(Index().match(PROMPT), dialect) == empty
    assert json.loads(AnswerForm([], dialect).write(match, {})) == empty


def test_columns_have_every_rank(match: Match) -> None:
    form = AnswerForm(INSTANCES)
    hits = form.columns(match)
    assert list(form.rows) == [A0, A1, B0, C0]
    assert hits.device.tolist() == [12, 4, 8, 0]
    assert hits.host.tolist() == [16, 4, 8, 0]
    assert hits.tokens.tolist() == [16, 4, 12, 0]
    assert form.write(hits, None) == form.write(match, None)


def test_columns_of_other_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="device must be a column of 4 numbers"):
        AnswerForm(INSTANCES).write(Hits(*[array("q", [1])] * 4), None)


def test_an_instance_is_as_good_as_its_worst_rank(match: Match) -> None:
    trusts = {A0: Trust(State.REPAIRING, True, 7), A1: Trust(State.STALE, False, 1), B0: LIVE}
    answer = written(match, "dynamo", trusts)["instances"]
    shown = {key: answer["1"][key] for key in ("state", "complete", "lag", "ranks")}
    assert shown == {
        "state": "repairing",
        "complete": False,
        "lag": 7,
        "ranks": {
            "0": {"state": "repairing", "complete": True, "lag": 7},
            "1": {"state": "stale", "complete": False, "lag": 1},
        },
    }
    assert (answer["b"]["state"], answer["b"]["complete"], answer["b"]["lag"]) == ("live", True, 0)
    assert shown.items() <= written(match, "rfc", trusts)["default"]["1"].items()


FROM_GOOD_TO_BAD = ["live", "stale", "repairing", "syncing", "connecting", "closed"]


@pytest.mark.parametrize(("good", "bad"), [*itertools.pairwise(FROM_GOOD_TO_BAD)])
def test_states_have_one_order(match: Match, good: str, bad: str) -> None:
    for first, second in ((good, bad), (bad, good)):
        trusts = {A0: Trust(State(first), True, 0), A1: Trust(State(second), True, 0)}
        assert written(match, "rfc", trusts)["default"]["1"]["state"] == bad
    assert set(FROM_GOOD_TO_BAD) == set(State)


def test_a_rank_of_which_nothing_is_known_is_connecting(match: Match) -> None:
    instance = written(match, "dynamo", {})["instances"]["b"]
    assert instance["ranks"] == {"0": {"state": "connecting", "complete": False, "lag": 0}}
    assert instance["state"] == "connecting"


def test_another_mapping_of_trusts_is_written_anew(match: Match) -> None:
    form = AnswerForm(INSTANCES, "rfc")

    def states(trusts: Mapping[Rank, Trust]) -> list[str]:
        answer = json.loads(form.write(match, trusts))["default"]
        return [answer[name]["state"] for name in ("1", "b")]

    before = {A0: LIVE, A1: LIVE, B0: LIVE}
    assert states(before) == states(before) == ["live", "live"]
    assert states({**before, B0: Trust(State.STALE, True, 0)}) == ["live", "stale"]
    assert states({**before, A1: Trust(State.CLOSED, True, 0)}) == ["closed", "live"]
    assert states({}) == ["connecting", "connecting"]
    assert states(before) == ["live", "live"]


def test_names_are_escaped() -> None:
    index = Index()
    store(index, A0, "GPU", range(1))
    for name in ('a"b\\c\n', "é€", "\x00", ""):
        answer = json.loads(AnswerForm([(name, [A0])]).write(index.match(PROMPT), {}))
        assert list(answer["scores"]) == list(answer["instances"]) == [name]
    big = AnswerForm([(2**64 - 1, [A0])]).write(index.match(PROMPT), None)
    assert list(json.loads(big)["instances"]) == ["18446744073709551615"]


@pytest.mark.parametrize(
    ("instances", "dialect", "message"),
    [
        ([(1, [A0])], "dynamoo", '"dynamo", "rfc"'),
        ([(1, [A0]), ("1", [B0])], "rfc", 'two instances are called "1"'),
        ([(1, [A0, B0])], "rfc", 'two ranks of instance "1" are called "0"'),
        ([(1, [A0]), (2, [A0])], "rfc", "has two rows"),
        ([("\ud800", [A0])], "rfc", "no text that UTF-8 can write"),
        ([(True, [A0])], "rfc", "its id is a number or a text"),
        ([(None, [A0])], "rfc", "its id is a number or a text"),
    ],
)
def test_a_form_that_cannot_be_written_is_refused(
    instances: Any, dialect: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AnswerForm(instances, dialect)
