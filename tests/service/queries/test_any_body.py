"""Property: whatever a query or an answer holds, it is read and written as JSON says."""

from __future__ import annotations

import json
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvindex.service.queries import Query, QueryError, read_query
from kvindex.wire._native import AnswerWriter

pytestmark = pytest.mark.property

PIECES = [
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u00", b" ", b"\n", b"\t\r"),
    *(b'"token_ids"', b'"token\\u005fids"', b'"token_ids":[', b'{"token_ids":[1', b'"a":'),
    *(b"0", b"-0", b"1.0", b"1e3", b"-1", b"4294967295", b"4294967296", b"99999999999999999999"),
    *(
        b"1234567,",
        b"12345678,",
        b"1,2,3,4,5,6,7,8,9,0," * 4,
        b"null",
        b"true",
        b"NaN",
        b"Infinity",
    ),
    *(b"\xff", b"\xc3\xa9", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x00", b"[" * 101, b"]" * 101),
]
spaces = st.text(" \n\r\t", max_size=2)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
tokens = st.integers(0, 2**32 - 1) | st.integers(0, 200_000)
prompts = st.lists(tokens) | st.lists(tokens).map(
    lambda prompt: prompt * 12
)  # some take many blocks


@st.composite
def objects(draw: st.DrawFn) -> str:
    """JSON objects in any spacing, with any escapes in the name of the tokens."""
    members = [(json.dumps(k), json.dumps(v)) for k, v in draw(st.lists(st.tuples(*MEMBER)))]
    letters = "token_ids"
    escaped = draw(
        st.lists(st.sampled_from(["{}", "\\u{:04x}", "\\u{:04X}"]), min_size=9, max_size=9)
    )
    name = "".join(
        letter if form == "{}" else form.format(ord(letter))
        for letter, form in zip(letters, escaped, strict=True)
    )
    if draw(st.booleans()):
        numbers = f"{draw(spaces)},{draw(spaces)}".join(map(str, draw(prompts)))
        place = draw(st.integers(0, len(members)))
        members.insert(place, (f'"{name}"', f"[{draw(spaces)}{numbers}{draw(spaces)}]"))
    inside = f"{draw(spaces)},{draw(spaces)}".join(
        f"{name}{draw(spaces)}:{draw(spaces)}{value}" for name, value in members
    )
    return f"{draw(spaces)}{{{draw(spaces)}{inside}{draw(spaces)}}}{draw(spaces)}"


MEMBER = (st.text(max_size=5), values)


@given(objects())
def test_what_is_read_is_what_json_says(text: str) -> None:
    query, whole = read_query(text.encode()), json.loads(text)
    expected = whole.pop("token_ids", None)
    assert (None if query.token_ids is None else query.token_ids.tolist()) == expected
    assert json.loads(query.rest) == whole


@given(objects(), st.data())
def test_a_body_that_is_cut_off_is_refused(text: str, data: st.DataObject) -> None:
    body = text.rstrip().encode()
    with pytest.raises(QueryError):
        read_query(body[: data.draw(st.integers(0, len(body) - 1))])


def read(body: bytes) -> Query | str:
    """Return a query, or why it is refused."""
    try:
        return read_query(body)
    except QueryError as error:
        return error.reason


def decoded(body: bytes) -> tuple[bool, Any]:
    try:
        return True, msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False, None


@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=3), max_size=25).map(b"".join))
@example(b'{"a":[}],"token_ids":[1]}')
@example(b'{"a":1"token_ids":[1],"b":2}')
@example(b'{"a":"\\","token_ids":[1],"b":"}')
def test_hostile_bytes_never_pass_as_json(body: bytes) -> None:
    is_json, whole = decoded(body)
    query = read(body)
    if isinstance(query, str):
        assert not (is_json and query == "malformed") or b"[" * 101 in body
        return
    rest_is_json, rest = decoded(query.rest)
    assert rest_is_json == is_json
    if is_json and query.token_ids is not None:
        assert whole.pop("token_ids") == query.token_ids.tolist()
    assert rest == whole


names = st.text(max_size=40).map(lambda name: msgspec.json.encode(name).decode())
counts = st.integers(0, 5) | st.sampled_from([16, 10**9, 2**63 - 1])
held = st.tuples(counts, counts, counts)
ranks_held = st.lists(st.tuples(names, held), max_size=4, unique_by=lambda rank: rank[0])
instances = st.lists(
    st.tuples(names, ranks_held), max_size=6, unique_by=lambda instance: instance[0]
)


@given(st.integers(0, 1), names, instances, st.booleans())
def test_answers_are_json_with_what_each_rank_holds(
    dialect: int,
    tenant: str,
    given: list[tuple[str, list[tuple[str, tuple[int, ...]]]]],
    trusted: bool,
) -> None:
    named = [(name, [rank for rank, _ in ranks]) for name, ranks in given]
    rows = [values for _, ranks in given for _, values in ranks]
    device, host, tokens = (array("q", [row[tier] for row in rows]) for tier in range(3))
    trusts = tuple(f',"trust":{at}'.encode() for at in range(len(given))) if trusted else None
    answer = json.loads(AnswerWriter(dialect, tenant, named).write(device, host, tokens, trusts))
    by_instance = answer["instances"] if dialect == 0 else answer[json.loads(tenant)]
    holding = {
        json.loads(n): at for at, (n, ranks) in enumerate(given) if any(h[2] for _, h in ranks)
    }
    assert by_instance.keys() == holding.keys()
    for name, at in holding.items():
        held = {json.loads(rank): row for rank, row in given[at][1] if row[2]}
        shown = by_instance[name]
        assert shown["longest_matched"] == max(row[2] for row in held.values())
        assert shown[("dp", "DP", "DP")[dialect]].keys() == held.keys()
        assert shown.get("trust") == (at if trusted else None)
