"""The native index and its Python twin, side by side: whatever happens, both say the same.

Collected only where the native module was built (conftest.py here); CI fails where it was not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ConfigurationError,
    DecodeError,
    EventBatch,
    KVIndexError,
    Rank,
    RankMatch,
    RankRows,
)
from kvindex.index import native, reference
from kvindex.index.api import BaseIndex
from kvindex.wire import CacheSettings, Event, GroupSpec, decode, decode_batch
from tests.examples import examples
from tests.index.index_queries import (
    SEED,
    SWEEP,
    Query,
    asked_about,
    counted,
    held,
    limits,
    queries,
)
from tests.index.index_steps import RANKS, Call, Sent, calls, sendings, themes
from tests.index.test_proofs import chain, label, sparse
from tests.wire.test_hostile_bytes import events as hostile_events
from tests.wire.test_hostile_bytes import nearly_stored

pytestmark = pytest.mark.property

many = examples(100)

ROWS = RankRows([Rank("nobody"), *reversed(RANKS)])
LIVE = bytes(row % 2 for row in range(len(ROWS)))


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the kind of error that it raises."""
    try:
        return call()
    except KVIndexError as error:
        return type(error)


def cut_off(query: Query) -> tuple[Any, dict[str, Any]]:
    """The prompt without the tokens that are recomputed, and the other options."""
    tokens, options = query.tokens(), dict(query.options)
    return tokens[: max(0, len(tokens) - options.pop("recomputed", 0))], options


def answer(index: BaseIndex, query: Query) -> Any:
    match = index.match(query.tokens(), **query.options)
    shortened, others = cut_off(query)
    assert list(match) == list(index.match(shortened, **others))
    by_rank = {rank: match[rank] for rank in RANKS if rank in match}
    hits, of_some = match.hits(ROWS), match.hits(ROWS, live=LIVE)
    for row, rank in enumerate(ROWS):
        entry = by_rank.get(rank, RankMatch(rank=rank))
        expected = (entry.device_tokens, entry.host_tokens, entry.tokens)
        assert (hits.device[row], hits.host[row], hits.tokens[row]) == expected
        assert expected == tuple(sorted(expected))
        assert of_some.tokens[row] == (entry.tokens if LIVE[row] else 0)
    return list(match), match.best, by_rank, hits, of_some


def explained(index: BaseIndex, query: Query) -> Any:
    explanation = index.explain(query.tokens(), **query.options)
    if "ranks" not in query.options and "block_size" not in query.options:
        match = index.match(query.tokens(), **query.options)
        assert [reason.match for reason in explanation] == list(match)
    for reason in explanation:
        assert reason.other is None or reason.other.tokens > reason.match.tokens
    return explanation.to_dict(), str(explanation)


class Twins:
    """The Python index, and two native ones: one fed with payloads, one with typed batches."""

    def __init__(self, **limits: Any) -> None:
        self.reference = reference.Index(seed=SEED, **limits)
        self.by_payload = native.Index(seed=SEED, **limits)
        self.by_batch = native.Index(seed=SEED, **limits)

    def all(self) -> tuple[BaseIndex, ...]:
        return self.reference, self.by_payload, self.by_batch

    def send(self, rank: Rank, payload: bytes) -> None:
        decoded: EventBatch | type[DecodeError]
        try:
            decoded = decode_batch(payload)
        except DecodeError:
            decoded = DecodeError
        else:
            self.reference.apply(rank, decoded)
            self.by_batch.apply(rank, decoded)
        result = outcome(lambda: self.by_payload.apply(rank, payload))
        assert result is (DecodeError if decoded is DecodeError else None)

    def take(self, step: Sent | Call) -> None:
        if isinstance(step, Sent):
            self.send(step.rank, step.payload())
        else:
            for index in self.all():
                step.on(index)

    def compare(self) -> None:
        for index in self.all():
            index.check()
        for twin in (self.by_payload, self.by_batch):
            assert twin.ranks == self.reference.ranks
            assert len(twin) == len(self.reference)
            assert counted(twin) == counted(self.reference)
            assert held(twin) == held(self.reference)

    def ask(self, query: Query) -> None:
        expected = outcome(partial(answer, self.reference, query))
        reasons = outcome(partial(explained, self.reference, query))
        for twin in (self.by_payload, self.by_batch):
            assert outcome(partial(answer, twin, query)) == expected
            assert outcome(partial(explained, twin, query)) == reasons


steps = themes.flatmap(
    lambda theme: st.lists(
        st.tuples(st.one_of(*[sendings(theme)] * 9, calls), queries), min_size=4, max_size=20
    )
)


@examples(60)
@given(limits, steps)
def test_whatever_is_told_both_hold_and_answer_the_same(
    limits: dict[str, Any], steps: list[tuple[Sent | Call, Query]]
) -> None:
    twins = Twins(**limits)
    for step, query in steps:
        twins.take(step)
        twins.compare()
        twins.ask(query)
        for question in asked_about(step):
            twins.ask(question)
    for query in SWEEP:
        twins.ask(query)
    for rank in RANKS:
        for index in twins.all():
            index.remove(rank)
    twins.compare()
    assert len(twins.by_payload) == twins.by_payload.statistics()["unique_blocks"] == 0


@many
@given(st.lists(st.one_of(nearly_stored(), hostile_events), min_size=1, max_size=4), st.booleans())
def test_hostile_events_are_read_alike(raw: list[Any], named: bool) -> None:
    twins = Twins()
    payload = msgspec.msgpack.encode([1.0, raw, None])
    rank = Rank("a", 0)
    if named:
        for index in twins.all():
            index.add(rank)
    for _ in range(2):
        twins.send(rank, payload)
        twins.compare()
    twins.ask(Query(3, 6, "list", {}))


@many
@given(st.lists(st.one_of(nearly_stored(), hostile_events), min_size=1, max_size=2))
def test_of_long_payloads_both_refuse_the_same(raw: list[Any]) -> None:
    payload = msgspec.msgpack.encode([1.0, raw, None])

    def refusal(read: Callable[[bytes], Any]) -> str | None:
        try:
            read(payload)
        except DecodeError as error:
            return str(error)
        return None

    with patch.object(decode, "MAX_RARE_BYTES", 0):  # any payload is a long one
        assert refusal(native.read_batch) == refusal(decode_batch)


def test_any_text_that_a_program_tells_is_told_back() -> None:
    """Typed events may hold code points that no payload can: half of a pair of surrogates."""
    twins = Twins()
    event = BlockStored(
        block_hashes=[1],
        token_ids=[0],
        block_size=1,
        medium="\ud800",
        kv_cache_spec_kind="\ud801",
    )
    batch = EventBatch(0.0, [event], skipped=("\ud802",))
    for index in twins.all():
        index.apply(Rank("a"), batch)
    twins.compare()
    twins.ask(Query(3, 2, "list", {"media": ["\ud800"]}))


@pytest.mark.parametrize(
    "event",
    [
        BlockStored(block_hashes=[b""], token_ids=[1], block_size=1),
        BlockStored(block_hashes=[1], parent_block_hash=b"", token_ids=[1], block_size=1),
        BlockRemoved(block_hashes=[b""]),
        BlockRemoved(block_hashes=[1], group_idx=2**32),
    ],
)
def test_what_has_no_native_form_is_refused(event: Event) -> None:
    index = native.Index()
    with pytest.raises(ConfigurationError):
        index.apply(Rank("a"), EventBatch(0.0, [event]))
    with pytest.raises(ConfigurationError):
        index.configure(Rank("a"), CacheSettings(groups={2**32: GroupSpec()}))


@pytest.mark.parametrize("module", [native, reference])
@pytest.mark.parametrize("counts", [[], [1, 2], [-1], [2**31]])
def test_copies_left_that_do_not_fit_a_typed_removal_change_nothing(
    module: Any, counts: list[int]
) -> None:
    index = module.Index()
    stored = BlockStored(block_hashes=[1], token_ids=[1], block_size=1)
    removed = BlockRemoved(block_hashes=[1], remaining_copy_counts=counts)
    index.apply(Rank("a"), EventBatch(0.0, [stored]))
    with pytest.raises(DecodeError, match="remaining_copy_counts"):
        index.apply(Rank("a"), EventBatch(0.0, [AllBlocksCleared(), removed]))
    assert len(index) == 1


@pytest.mark.parametrize("window", [-(2**63) - 1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 2**70])
def test_the_extremes_of_a_window_are_shown_the_same(window: int) -> None:
    event = BlockStored(
        block_hashes=[1],
        token_ids=[0],
        block_size=1,
        kv_cache_spec_kind="full_attention",
        kv_cache_spec_sliding_window=window,
    )
    batches: list[EventBatch | bytes] = [EventBatch(0.0, [event])]
    if -(2**63) <= window < 2**64:
        batches.append(msgspec.msgpack.encode([0, [event]]))
    shown = set()
    for module, batch in product((native, reference), batches):
        index = module.Index()
        index.apply(Rank("a"), batch)
        shown.add(index.statistics()["ranks"]["a/0"]["groups"]["0"]["sliding_window"])
    assert shown == {window if -(2**63) <= window < 2**63 else None}


@st.composite
def chained(draw: st.DrawFn) -> list[Event]:
    """Sparse events of a model of windows only, under vLLM's own hashes, or nearly."""
    one_in = partial(draw, st.integers(0, 9))
    raw = draw(st.booleans())
    events: list[Event] = []
    known: list[tuple[tuple[int, ...], str | None]] = [((), None), ((), "salt")]
    for _ in range(draw(st.integers(1, 15))):
        before, salt = draw(st.sampled_from(known))
        numbers = (*before, *draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)))
        token_ids = [number * 70_000 + i for number in numbers for i in range(4)]
        digests = chain(token_ids, salt=salt)
        places = range(len(before), len(numbers))
        named = [place for place in places if draw(st.booleans())]
        if one_in() == 0:
            named.reverse()
        about: dict[str, Any] = {}
        if salt is not None and not before and named:
            about["extra_keys"] = [(salt,), *[None] * (len(named) - 1)]
        if one_in() == 0:
            about["lora_name"] = "lora"
        if one_in() == 0:
            about["kv_cache_spec_kind"] = "mamba"
            about["group_idx"] = 1
        if one_in() == 0:
            digests = chain(token_ids, seed="another")
        start = len(before)
        if not raw and start % 2 == len(numbers) % 2 == 0 and draw(st.booleans()):
            about |= {"kv_cache_spec_kind": "mamba", "group_idx": 1, "size": 8}
            digests, start = digests[1::2], start // 2
            named = sorted({place // 2 for place in named})
            if "extra_keys" in about:
                about["extra_keys"] = about["extra_keys"][: len(named)]
        events.append(sparse(token_ids, *named, start=start, digests=digests, raw=raw, **about))
        known += [(numbers[:end], salt) for end in range(len(before) + 1, len(numbers) + 1)]
        if draw(st.booleans()):
            gone = [digests[place] if raw else label(digests[place]) for place in named]
            events.append(BlockRemoved(block_hashes=gone, group_idx=draw(st.integers(0, 1))))
        if one_in() == 0:
            events.append(AllBlocksCleared())
    return events


@many
@given(chained(), st.sampled_from([None, 1, 3, 6]))
def test_what_the_engines_hash_chain_proves_is_the_same(
    events: list[Event], most: int | None
) -> None:
    both = [module.Index(seed=SEED, max_blocks_per_rank=most) for module in (native, reference)]
    for event in events:
        for index in both:
            index.apply(Rank("a"), EventBatch(0.0, [event]))
            index.check()
        assert counted(both[0]) == counted(both[1])
        assert held(both[0]) == held(both[1])
