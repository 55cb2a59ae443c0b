"""A query's JSON to tokens and the rest, and what is said of bodies that are no queries."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from kvindex import (
    ConfigurationError,
    Hits,
    Index,
    Match,
    Rank,
    State,
    Trust,
)
from kvindex.service.queries import AnswerForm, QueryError, read_query
from tests.index.index_events import apply, index_of, prompt, stored

pytestmark = pytest.mark.unit


def tokens_of(body: bytes) -> list[int] | None:
    tokens = read_query(body).token_ids
    return None if tokens is None else tokens.tolist()


def refusal(body: bytes, max_tokens: int | None = None) -> QueryError:
    with pytest.raises(QueryError) as caught:
        read_query(body, max_tokens=max_tokens)
    return caught.value


@pytest.mark.parametrize(
    ("body", "tokens", "rest"),
    [
        (b'{"token_ids":[1,2,3]}', [1, 2, 3], {}),
        (b'{"token_ids":[],"model":"m"}', [], {"model": "m"}),
        (b'{"model":"m","token_ids":[7]}', [7], {"model": "m"}),
        (b'{"a":1,"token_ids":[7],"b":[]}', [7], {"a": 1, "b": []}),
        (b' \n{ "a" : 1 ,\t"token_ids" : [ 0 , 4294967295\r] , "b":2 } ', [0, 2**32 - 1], ...),
        (b'{"token\\u005fids":[5]}', [5], {}),
        (b'{"\\u0074\\u006F\\u006bEN_ids":[5]}', None, {"tokEN_ids": [5]}),
        (b'{"a":{"token_ids":["x"]},"s":"\\"token_ids\\":[1]"}', None, ...),
        (b'{"a":"\\\\","token_ids":[1]}', [1], {"a": "\\"}),
        (b'{"a":null,"a":1.5e3}', None, {"a": 1500.0}),
        (b"{}", None, {}),
    ],
)
def test_tokens_are_read_and_the_rest_is_left(
    body: bytes, tokens: list[int] | None, rest: object
) -> None:
    assert tokens_of(body) == tokens
    whole = json.loads(body)
    if tokens is not None:
        assert whole.pop("token_ids") == tokens
    assert rest in (..., whole)
    assert json.loads(read_query(body).rest) == whole


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_any_buffer_of_bytes_is_read(make: type) -> None:
    query = read_query(make(b'{"token_ids":[1,2],"lora_name":null}'))
    assert query.token_ids is not None
    assert query.token_ids.format == "I"
    assert query.token_ids.tolist() == [1, 2]
    assert query.rest == b'{"lora_name":null}'


@pytest.mark.parametrize("wrong", ["{}", 3, None, [1], memoryview(b"{ } ")[::2]])
def test_what_has_no_row_of_bytes_is_a_type_error(wrong: object) -> None:
    with pytest.raises(TypeError, match="bytes, a bytearray or a memoryview"):
        read_query(wrong)  # type: ignore[arg-type]


def test_the_index_reads_the_tokens_where_they_are() -> None:
    index = index_of(stored(0, token_ids=[1, 2, 3, 4]))
    tokens = read_query(b'{"token_ids":[1,2,3,4,5]}').token_ids
    assert tokens is not None
    assert index.match(tokens)["a"].tokens == 4


@pytest.mark.parametrize(
    ("written", "shown", "reason"),
    [
        ("-1", "-1", "range"),
        ("4294967296", "4294967296", "range"),
        ("9" * 400, "9" * 40 + "…", "range"),
        ("-" + "9" * 20, "-" + "9" * 20, "range"),
        ("1.0", "1.0", "type"),
        ("1e3", "1e3", "type"),
        ("1E+400", "1E+400", "type"),
        ("-0", "-0", "type"),
        ("-0.0", "-0.0", "type"),
        ("0.5", "0.5", "type"),
        ("null", "null", "type"),
        ("true", "true", "type"),
        ('"1"', "a string", "type"),
        ("[1]", "an array", "type"),
        ("{}", "an object", "type"),
    ],
)
@pytest.mark.parametrize("behind", ["", ",3", " , 3", " "])
def test_a_wrong_token_is_named_with_its_place(
    written: str, shown: str, reason: str, behind: str
) -> None:
    error = refusal(f'{{"token_ids":[1, 2,{written}{behind}]}}'.encode())
    assert str(error) == f"token_ids[2] is {shown}: a token is a whole number from 0 to 4294967295"
    assert (error.field, error.position, error.reason) == ("token_ids", 2, reason)
    assert not error.malformed


@pytest.mark.parametrize("place", [0, 1, 99, 198, 199])
@pytest.mark.parametrize("written", ["-1", "1.5", "4294967296", '""', "01", "0x1", "", " "])
def test_a_wrong_token_among_many_is_found(place: int, written: str) -> None:
    row = [str(n * 997) for n in range(200)]
    row[place] = written
    error = refusal(f'{{"token_ids":[{",".join(row)}]}}'.encode())
    assert error.malformed == (written in ("01", "0x1", "", " "))
    assert error.malformed or error.position == place


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "it is empty"),
        (b"  ", "it ends at byte 2, within a value"),
        (b'{"token_ids":[1,2', "it ends at byte 17, within a value"),
        (b'{"token_ids":[1,', "it ends at byte 16, within a value"),
        (b'{"a":"b', "it ends at byte 7, within a value"),
        (b'{"a":"b\\', "it ends at byte 8, within a value"),
        (b'{"a":[{}', "it ends at byte 8, within a value"),
        (b'{"token_ids":[1,]}', "at byte 16 stands ]}, which cannot be there"),
        (b'{"token_ids":[,1]}', "at byte 14 stands ,1]}, which cannot be there"),
        (b'{"token_ids":[01]}', "at byte 14 stands 01]}, which cannot be there"),
        (b'{"token_ids":[+1]}', "at byte 14 stands +1]}, which cannot be there"),
        (b'{"token_ids":[NaN]}', "at byte 14 stands NaN]}, which cannot be there"),
        (b'{"token_ids":[1.]}', "at byte 14 stands 1.]}, which cannot be there"),
        (b'{"token_ids":[1 2]}', "at byte 16 stands 2]}, which cannot be there"),
        (b'{"token_ids":nul}', "at byte 13 stands nul}, which cannot be there"),
        (b'{"token_ids":[1],}', "at byte 17 stands }, which cannot be there"),
        (b'{"token_ids" [1]}', "at byte 13 stands [1]}, which cannot be there"),
        (b'{"a":}', "at byte 5 stands }, which cannot be there"),
        (b"{a:1}", "at byte 1 stands a:1}, which cannot be there"),
        (b'{"a":1}{', "at byte 7 stands {, which cannot be there"),
        (b'\xef\xbb\xbf{"a":1}', r'it begins with \xef\xbb\xbf{"a":1}'),
        (b"[1,2", "it begins with [1,2"),
        (b"tru\n\x1b", r"it begins with tru\n\x1b"),
        (b'{"a":"\xff"}', "it has bytes that are not UTF-8"),
        (b'{"\xed\xa0\x80":1}', "it has bytes that are not UTF-8"),
        (b'{"a":' + b"[" * 101 + b"]" * 101 + b"}", "at byte 105 values are nested more than"),
        (b'{"a":' + b'{"a":' * 10**5, "at byte 505 values are nested more than 100 levels"),
    ],
)
def test_a_body_that_is_no_json_is_malformed(body: bytes, message: str) -> None:
    error = refusal(body)
    assert str(error).startswith(f"the body is not JSON: {message}")
    assert error.malformed
    assert error.reason == "malformed"
    assert (error.field, error.position) == ("", None)


@pytest.mark.parametrize(
    ("body", "message", "field"),
    [
        (b"[1,2]", "the body is an array: it must be a JSON object", ""),
        (b' "x"', "the body is a string: it must be a JSON object", ""),
        (b"12", "the body is 12: it must be a JSON object", ""),
        (b'{"token_ids":null}', "token_ids is null: it must be an array of tokens", "token_ids"),
        (b'{"token_ids":"AQ=="}', "token_ids is a string: it must be an array", "token_ids"),
        (b'{"token_ids":{"0":1}}', "token_ids is an object: it must be an array", "token_ids"),
        (b'{"token_ids":7}', "token_ids is 7: it must be an array of tokens", "token_ids"),
    ],
)
def test_json_of_another_kind_is_not_malformed(body: bytes, message: str, field: str) -> None:
    error = refusal(body)
    assert str(error).startswith(message)
    assert (error.malformed, error.reason, error.field) == (False, "type", field)


@pytest.mark.parametrize("second", [b'"token_ids"', b'"token\\u005fids"', b'"\\u0074oken_ids"'])
def test_a_second_token_ids_is_refused_however_it_is_spelled(second: bytes) -> None:
    error = refusal(b'{"token_ids":[1],"a":2,' + second + b":[2]}")
    assert str(error) == "token_ids is given more than once: send it once"
    assert (error.malformed, error.reason) == (False, "repeated")


def test_more_tokens_than_allowed_are_refused() -> None:
    body = b'{"token_ids":[1,2,3,4,5,6,7,8,9,10,11,12]}'
    query = read_query(body, max_tokens=12)
    assert query.token_ids is not None
    assert len(query.token_ids) == 12
    error = refusal(body, max_tokens=11)
    assert str(error) == "token_ids is more than 11 tokens: send fewer"
    assert (error.malformed, error.reason, error.position) == (False, "too_many", 11)
    long = json.dumps({"token_ids": [*range(1000)]}).encode()
    assert [refusal(long, max_tokens=n).position for n in (1, 500, 999)] == [1, 500, 999]
    assert refusal(b'{"token_ids":[1]}', max_tokens=0).reason == "too_many"
    assert read_query(b'{"token_ids":[]}', max_tokens=0).token_ids is not None
    assert read_query(body, max_tokens=2**80).rest == b"{}"
    with pytest.raises(ConfigurationError, match="max_tokens is -1"):
        read_query(body, max_tokens=-1)


def test_depth_that_is_read_can_be_decoded() -> None:
    body = b'{"a":' + b"[" * 100 + b"]" * 100 + b"}"
    assert msgspec.json.decode(read_query(body).rest) == json.loads(body)


PROMPT = prompt(4)
A0, A1, B0, C0 = Rank("a", 0), Rank("a", 1), Rank("b", 0), Rank("c", 0)
INSTANCES: list[tuple[int | str, list[Rank]]] = [(1, [A0, A1]), ("b", [B0]), (3, [C0])]
LIVE = Trust(State.LIVE, True, 0)


@pytest.fixture
def match() -> Match:
    """a/0: three blocks on the device, all four on the host. a/1: one. b: two, then one on disk."""
    index = index_of(stored(0, 1, 2), stored(0, 1, 2, 3, medium="CPU"), rank=A0)
    apply(index, A1, stored(0))
    apply(index, B0, stored(0, 1), stored(0, 1, 2, medium="DISK"))
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
    index = index_of(stored(0, 1, medium="CPU"), rank=A0)
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
    index = index_of(stored(0), rank=A0)
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
