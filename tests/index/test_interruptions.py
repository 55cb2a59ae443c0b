"""A Ctrl-C may come at any moment; a thread that decodes for an index lets others run."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from functools import partial
from typing import Any

import pytest

import kvindex
from kvindex import (
    EventBatch,
    Index,
    InvariantError,
    TokenError,
    UnknownRankError,
)
from kvindex.index import read_batch, reference
from kvindex.wire import encode_batch
from tests.index.index_events import A, B, prompt, stored
from tests.live import meanwhile

pytestmark = pytest.mark.unit


def batch(*numbers: int) -> EventBatch:
    return EventBatch(ts=0.0, events=[stored(*numbers)])


def python_index() -> reference.Index:
    index = reference.Index()
    index.apply(A, batch(0, 1))
    return index


def test_a_change_that_a_ctrl_c_cuts_short_is_never_answered_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = python_index()
    index.add(B)
    blocks = index._ranks[B].blocks
    extend = blocks.extend

    def cut_short(*args: Any, **options: Any) -> None:
        extend(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(blocks, "extend", cut_short)
    with pytest.raises(KeyboardInterrupt):
        index.apply(B, batch(0, 1, 2))
    for call in (partial(index.match, prompt(2)), partial(index.remove, B), index.statistics):
        with pytest.raises(InvariantError, match=r"KeyboardInterrupt .* make a new one"):
            call()


def test_a_refused_change_leaves_the_index_usable() -> None:
    index = python_index()
    with pytest.raises(TokenError):
        index.apply(A, EventBatch(ts=0.0, events=[stored(2, token_ids=[1.5] * 4)]))
    with pytest.raises(UnknownRankError):
        index.tree(B)
    assert index.match(prompt(2))[A].blocks == 2


def test_only_who_uses_an_index_keeps_it() -> None:
    index = Index()
    dropped = weakref.ref(index)
    del index
    gc.collect()
    assert dropped() is None


@pytest.mark.skipif(kvindex.BACKEND != "native", reason="the Python index decodes in Python")
def test_other_threads_run_while_a_long_payload_is_decoded() -> None:
    payload = encode_batch(batch(*range(100_000)))
    steps = [0]

    def step() -> None:
        steps[0] += 1
        time.sleep(0)  # gives the GIL away, and has it again when somebody else does

    interval = sys.getswitchinterval()
    try:
        with meanwhile(step):
            sys.setswitchinterval(1000.0)  # whoever has the GIL is not asked for it
            for _ in range(50):
                before = steps[0]
                read_batch(payload)
                if steps[0] > before:
                    return
    finally:
        sys.setswitchinterval(interval)
    pytest.fail("no other thread had a turn while the payload was decoded")
