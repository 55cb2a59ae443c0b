"""Queries and answers as JSON, natively and in Python, side by side: they say the same.

Collected only where the native module was built (conftest.py here).
"""

from __future__ import annotations

import json
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvindex import Hits
from kvindex.service.queries.scanning import Fault, Scanned, scan_in_python
from kvindex.service.queries.writing import AnswerDialect, PythonWriter
from kvindex.wire._native import AnswerWriter
from kvindex.wire._native import read_query as scan_natively

pytestmark = pytest.mark.property

ANY = 2**62

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
prompts = st.lists(tokens) | st.lists(tokens).map(lambda some: some * 12)  # some take many blocks


def scan(body: bytes, max_tokens: int = ANY) -> Scanned:
    found, other = scan_natively(body, max_tokens), scan_in_python(body, max_tokens)
    assert found == scan_natively(bytearray(body), max_tokens)
    if len(found) == len(other) == 2:
        assert found[0] == other[0]
        assert json.loads(found[1]) == json.loads(other[1])
    else:  # the one in Python finds faults of the rest at once
        assert len(other) == 3
        assert Fault(other[0])
        assert 0 <= other[1] <= len(body)
        assert len(found) == 3 or not decoded(found[1])[0]
    return found


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
    found = scan(text.encode())
    assert len(found) == 2
    whole = json.loads(text)
    expected = whole.pop("token_ids", None)
    told = None if found[0] is None else memoryview(found[0]).cast("I").tolist()
    assert told == expected
    assert json.loads(found[1]) == whole


@given(objects(), st.data())
def test_a_body_that_is_cut_off_is_refused(text: str, data: st.DataObject) -> None:
    body = text.rstrip().encode()
    assert len(scan(body[: data.draw(st.integers(0, len(body) - 1))])) == 3


def decoded(body: bytes) -> tuple[bool, Any]:
    try:
        return True, msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False, None


@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=3), max_size=25).map(b"".join))
@example(b'{"a":[}],"token_ids":[1]}')
@example(b'{"a":1"token_ids":[1],"b":2}')
@example(b'{"a":"\\","token_ids":[1],"b":"}')
def test_hostile_bytes_are_read_alike_and_never_pass_as_json(body: bytes) -> None:
    for max_tokens in (ANY, 2):
        found = scan(body, max_tokens)
        if len(found) == 3:
            assert Fault(found[0])
            assert 0 <= found[1] <= len(body)
            continue
        is_json, whole = decoded(body)
        rest_is_json, rest = decoded(found[1])
        assert rest_is_json == is_json
        if is_json and found[0] is not None:
            assert whole.pop("token_ids") == memoryview(found[0]).cast("I").tolist()
        assert rest == whole


names = st.text(max_size=40).map(lambda name: msgspec.json.encode(name).decode())
counts = st.integers(0, 5) | st.sampled_from([16, 10**9, 2**63 - 1])
held = st.tuples(counts, counts, counts, counts)
ranks_held = st.lists(st.tuples(names, held), max_size=4, unique_by=lambda rank: rank[0])
instances = st.lists(
    st.tuples(names, ranks_held), max_size=6, unique_by=lambda instance: instance[0]
)


@given(st.sampled_from(AnswerDialect), names, instances, st.booleans())
def test_answers_are_written_alike_and_are_json(
    dialect: AnswerDialect,
    tenant: str,
    given: list[tuple[str, list[tuple[str, tuple[int, ...]]]]],
    trusted: bool,
) -> None:
    named = [(name, [rank for rank, _ in ranks]) for name, ranks in given]
    rows = [values for _, ranks in given for _, values in ranks]
    columns = Hits._make(array("q", [row[tier] for row in rows]) for tier in range(4))
    trusts = tuple(f',"trust":{at}'.encode() for at in range(len(given))) if trusted else None
    told = AnswerWriter(dialect, tenant, named).write(*columns, trusts)
    assert told == PythonWriter(dialect, tenant, named).write(*columns, trusts)
    assert isinstance(json.loads(told), dict)
