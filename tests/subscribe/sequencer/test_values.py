"""The values around a sequencer: settings, and cursors as values and as bytes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex import BACKEND, index, wire
from kvindex.subscribe.resumption import SavedCursor
from kvindex.subscribe.sequencer import MAX_SEQ, Cursor, ReplayPolicy, SequencerConfig, State
from kvindex.wire.errors import ConfigurationError, DecodeError
from tests.children import ENVIRONMENT, run_code

pytestmark = pytest.mark.unit


REPLAY = ReplayPolicy
CONFIG = partial(SequencerConfig, has_replay=True)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (REPLAY, {"timeout": 0.0}, "ReplayPolicy.timeout"),
        (REPLAY, {"timeout": float("inf")}, "ReplayPolicy.timeout"),
        (REPLAY, {"attempts": 0}, "ReplayPolicy.attempts"),
        (REPLAY, {"backoff": -1.0}, "ReplayPolicy.backoff"),
        (REPLAY, {"backoff": 6.0}, "ReplayPolicy.max_backoff"),
        (CONFIG, {"on_loss": "ignore"}, "on_loss"),
        (CONFIG, {"probe_interval": 0.0}, "probe_interval"),
        (CONFIG, {"stale_after": float("nan")}, "stale_after"),
        (CONFIG, {"max_held": 0}, "max_held"),
        (CONFIG, {"max_held_bytes": 0}, "max_held_bytes"),
        (CONFIG, {"recent": 0}, "recent"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    make: Callable[..., object], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make(**options)


def test_states_read_as_their_names() -> None:
    assert [str(state) for state in State][:3] == ["connecting", "syncing", "live"]
    assert State("live") is State.LIVE


FIELDS: dict[str, Any] = {
    "epoch": 1,
    "seq": 7,
    "ts": 1_000.5,
    "next_seq": 8,
    "complete": True,
    "oldest_ts": 999.0,
    "kept_losses": False,
    "recent": {6: -(2**63), 7: 2**63 - 1},
}


def saved(**fields: Any) -> SavedCursor:
    return SavedCursor(
        cursor=Cursor(**{**FIELDS, **fields}), dp_rank=0, named=3, fingerprints="nh64:0"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"oldest_ts": -math.inf},
        {"seq": MAX_SEQ, "next_seq": MAX_SEQ + 1, "recent": {MAX_SEQ: 0}},
        {"next_seq": 12, "complete": False, "kept_losses": True},
    ],
)
def test_a_cursor_comes_back_from_its_bytes(fields: dict[str, Any]) -> None:
    assert SavedCursor.decode(saved(**fields).encode()) == saved(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"epoch": -1},
        {"seq": -1, "recent": {-1: 0}},
        {"next_seq": 7},
        {"recent": {}},
        {"recent": {6: 0}},
        {"recent": {7: 0, 8: 0}},
        {"recent": {7: 0, -1: 0}},
        {"next_seq": 9},
        {"kept_losses": True},
    ],
)
def test_what_no_stream_can_have_reached_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="no stream stands at"):
        Cursor(**{**FIELDS, **fields})
    raw = msgspec.to_builtins(saved())
    raw["cursor"].update(fields)
    with pytest.raises(DecodeError):
        SavedCursor.decode(msgspec.msgpack.encode((1, raw)))


def test_no_seq_is_beyond_the_largest() -> None:
    with pytest.raises(ConfigurationError):
        Cursor(**{**FIELDS, "complete": False, "next_seq": MAX_SEQ + 2})


def test_another_version_is_refused_by_its_number() -> None:
    with pytest.raises(DecodeError, match=r"version 2; .* 1"):
        SavedCursor.decode(msgspec.msgpack.encode((2, "whatever it will be")))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_cursor_or_a_decode_error(data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        SavedCursor.decode(data)


@given(st.data())
def test_damaged_bytes_are_a_cursor_or_a_decode_error(data: st.DataObject) -> None:
    damaged = bytearray(saved().encode())
    position = data.draw(st.integers(0, len(damaged) - 1))
    damaged[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError):
        SavedCursor.decode(bytes(damaged))


@pytest.mark.parametrize("data", [b"\x92\x01" + b"\x91" * 100_000, b"\x91" * 100_000])
def test_deep_bytes_are_a_decode_error(data: bytes) -> None:
    with pytest.raises(DecodeError) as refused:
        SavedCursor.decode(data)
    assert refused.value.size == len(data)


# Fingerprints: the Python ones and those of the backend in use, which may be the same ------------

MAKERS: list[type[Any]] = [wire.Fingerprints, index.Fingerprints]


@pytest.mark.parametrize("make", MAKERS)
@given(payload=st.binary(max_size=300), seed=st.integers(0, 2**128 - 1))
def test_fingerprints_are_signed_words_that_depend_on_payload_and_seed(
    make: type[wire.Fingerprints], payload: bytes, seed: int
) -> None:
    fingerprints = make(seed)
    found = fingerprints.of(payload)
    assert -(2**63) <= found < 2**63
    assert found == make(seed).of(payload)
    assert found != fingerprints.of(payload + b"\0")
    assert found != make(seed ^ 1).of(payload)
    assert fingerprints.identity == make(seed).identity != make(seed ^ 1).identity


@pytest.mark.parametrize("make", MAKERS)
def test_fingerprints_of_another_process_are_the_same(make: type[wire.Fingerprints]) -> None:
    code = (
        f"from {make.__module__} import Fingerprints as F; f = F(7);"
        "print(f.identity, f.of(b'payload'))"
    )
    printed = f"{make(7).identity} {make(7).of(b'payload')}\n"
    for seed in ("1", "2"):
        env = {**ENVIRONMENT, "PYTHONHASHSEED": seed, "KVINDEX_BACKEND": BACKEND}
        assert run_code(code, env=env) == (0, printed, "")


def test_fingerprints_of_two_implementations_do_not_pass_for_each_other() -> None:
    identities = {make(7).identity for make in MAKERS}
    assert len(identities) == len(set(MAKERS))
