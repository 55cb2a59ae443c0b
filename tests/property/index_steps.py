"""What may happen to an index, drawn so that it collides: few tokens, few labels, all dialects.

A `Told` is one event as a handful of choices; the size of its blocks and its lookahead come from
whoever sends it. Chains share texts, so that they meet, repeat, fork and leave holes; labels are
mostly true, at times shared by several blocks, or second ones of a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
from hypothesis import strategies as st

from kvindex import AllBlocksCleared, BlockRemoved, BlockStored, EncodeError, EventBatch, Rank
from kvindex.wire import DIALECTS, BlockHash, Dialect, Event, GroupSpec, encode_batch
from kvindex.wire.quirks import EMPTY_TUPLE_HASH, content_hash

RANKS = {Rank("a", 0): 2, Rank("a", 1): 2, Rank("b", 0): 3}  # block sizes, usually
TEXTS: tuple[tuple[int, ...], ...] = (
    (0,) * 12,
    (0, 0, 0, 0, 1, 2, 1, 2, 1, 2, 1, 0, 0),
    (0, 0, 1, 1, 0, 0, 2, 2, 0, 0, 0, 1),
    tuple(range(13)),
    (0, 0, -1, 2**32, 2**31, 0, 2**63, 1, 2**64 - 1, 0, 0, 0),
    tuple(i % 9 for i in range(2000)),  # more than a prompt's first part
)
EXTRAS: tuple[tuple[Any, ...] | None, ...] = (
    None,
    ("image", 3),
    (("image", 3), "lora"),
    (b"\x00\xff" * 3, 1.5, -1, True, None, 2**40, 2**64 - 1, -(2**40), -40000, -200),
    ("lora", "salt", ("a", ("b", ("c", 7))), "x" * 40, "ä", "lora"),
)


def usually(value: Any, *others: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([value] * (14 * len(others)) + list(others))


# Labels ---------------------------------------------------------------------------------------


def _number(prefix: Sequence[int]) -> int:
    return crc32(repr(prefix).encode())


def _digest(prefix: Sequence[int], block: Sequence[int]) -> BlockHash:
    return _number(prefix).to_bytes(4, "big") * 8


LABELS: dict[str, Callable[[Sequence[int], Sequence[int]], BlockHash]] = {
    "int": lambda prefix, block: _number(prefix),
    "signed": lambda prefix, block: _number(prefix) - 2**63,
    "digest": _digest,
    "second": lambda prefix, block: _number(prefix) + 1,
    "shared": lambda prefix, block: _number(prefix) % 4,
    "content": lambda prefix, block: content_hash(block),
}
schemes = st.sampled_from(["int"] * 24 + ["second"] * 9 + ["shared"] * 4 + list(LABELS))


def label(text: Sequence[int], size: int, block: int, scheme: str) -> BlockHash:
    stop = (block + 1) * size
    return LABELS[scheme](text[:stop], text[stop - size : stop])


# Events ---------------------------------------------------------------------------------------


class Group(NamedTuple):
    idx: int | None = None
    kind: str | None = None
    window: int | None = None


class Told(NamedTuple):
    """One event as choices."""

    what: str
    text: Sequence[int]
    start: int
    length: int
    scheme: str
    parent: str
    medium: str | None
    group: Group
    lora: tuple[str | None, int | None]
    extras: int | None
    salt: str | None
    fault: str | None
    odd_size: int | None

    def event(self, size: int, lookahead: int) -> Event:
        if self.what == "clear":
            return AllBlocksCleared()
        size = self.odd_size or size
        last = max(1, (len(self.text) - lookahead) // size)
        start = min(self.start, last - 1)
        blocks = range(start, min(start + self.length, last))
        hashes = [label(self.text, size, block, self.scheme) for block in blocks]
        if self.what == "remove":
            return BlockRemoved(block_hashes=hashes, medium=self.medium, group_idx=self.group.idx)
        if self.what == "locate":
            return BlockStored(
                block_hashes=hashes,
                token_ids=[],
                block_size=0,
                medium=self.medium,
                group_idx=self.group.idx,
            )
        return self._stored(size, lookahead, blocks, hashes)

    def _stored(
        self, size: int, lookahead: int, blocks: range, hashes: list[BlockHash]
    ) -> BlockStored:
        keys = None
        if self.extras is not None:
            keys = [EXTRAS[(self.extras + block) % len(EXTRAS)] for block in blocks]
        fields: dict[str, Any] = {
            "block_hashes": hashes,
            "parent_block_hash": self._parent(size, blocks.start),
            "token_ids": list(self.text[blocks.start * size : blocks.stop * size]),
            "block_size": size,
            "lora_name": self.lora[0],
            "lora_id": self.lora[1],
            "medium": self.medium,
            "group_idx": self.group.idx,
            "kv_cache_spec_kind": self.group.kind,
            "kv_cache_spec_sliding_window": self.group.window,
            "extra_keys": keys,
            "cache_salt": self.salt,
        }
        if lookahead:
            stops = [(block + 1) * size for block in blocks]
            fields["lookahead_token_ids"] = [
                list(self.text[stop : stop + lookahead]) for stop in stops
            ]
        self._spoil(fields)
        return BlockStored(**fields)

    def _parent(self, size: int, start: int) -> BlockHash | None:
        named = {"none": None, "zero": 0, "empty tuple": EMPTY_TUPLE_HASH, "odd": 3, "bytes": b"?"}
        if self.parent in named:
            return named[self.parent]
        return label(self.text, size, start - 1, self.scheme) if start else None

    def _spoil(self, fields: dict[str, Any]) -> None:
        if self.fault == "tokens":
            fields["token_ids"].append(1)
        elif self.fault == "hashes":
            fields["block_hashes"] = []
        elif self.fault == "size":
            fields["block_size"] = 0
        elif self.fault == "extras":
            fields["extra_keys"] = [("image",)] * 7
        elif self.fault == "lookahead":
            fields["lookahead_token_ids"] = [[1], [1, 2]]


groups = st.sampled_from(
    [
        *[Group()] * 90,
        *[Group(0), Group(0, "full_attention"), Group(0, "sliding_window", 3), Group(2, "mamba")],
        *[Group(1), Group(1, "sliding_window", 4), Group(1, "sliding_window_mla", 5)],
        *[Group(1, "sliding_window"), Group(0, "full_attention", -7), Group(4, "new", 2**31)],
        *[Group(3, "encoder_only_attention"), Group(2**31 - 1)],
    ]
)
tellings = st.builds(
    Told,
    what=st.sampled_from(["store"] * 20 + ["remove"] * 8 + ["locate", "locate", "clear"]),
    text=st.sampled_from([*TEXTS[:2] * 4, *TEXTS]),
    start=st.sampled_from([0, 0, 0, 0, 1, 2, 3, 5]),
    length=st.integers(1, 6),
    scheme=schemes,
    parent=usually("before", "none", "zero", "empty tuple", "odd", "bytes"),
    medium=usually(None, "GPU", "CPU", "cpu", "cuda:0"),
    group=groups,
    lora=usually((None, None), ("lora", None), (None, 7), ("lora", 7), ("", 0), (None, -5)),
    extras=usually(None, 0, 1, 2, 3, 4),
    salt=usually(None, "salt", ""),
    fault=usually(None, "tokens", "hashes", "size", "extras", "lookahead"),
    odd_size=usually(None, 1, 2, 3, 4, 300),
)


# Payloads -------------------------------------------------------------------------------------


class Edit(NamedTuple):
    at: int
    cut: int
    put: bytes


class Sent(NamedTuple):
    """A payload of some engine, perhaps damaged on the way."""

    rank: Rank
    told: list[Told]
    dialect: Dialect | None
    lookahead: int
    edits: list[Edit]

    def payload(self) -> bytes:
        bigrams = self.dialect is not None and self.dialect.bigrams
        lookahead = 1 if bigrams else self.lookahead
        events = [some.event(RANKS[self.rank], lookahead) for some in self.told]
        payload = bytearray(_encoded(events, self.dialect))
        for at, cut, put in self.edits:
            at %= len(payload) + 1
            payload[at : at + cut] = put
        return bytes(payload)


def _encoded(events: list[Event], dialect: Dialect | None) -> bytes:
    if dialect is not None:
        try:
            return encode_batch(EventBatch(ts=1.5, events=events), dialect)
        except EncodeError:  # the dialect cannot say this: all that maps can be said in is a map
            pass
    return msgspec.msgpack.encode([1, events, None])


edits = st.builds(
    Edit, at=st.integers(0, 4096), cut=st.integers(0, 2), put=st.binary(min_size=1, max_size=3)
)
sendings = st.builds(
    Sent,
    rank=st.sampled_from([*list(RANKS) * 2, Rank("a", 0)]),
    told=st.lists(tellings, min_size=1, max_size=4),
    dialect=st.sampled_from([*[None] * 12, *DIALECTS.values()]),
    lookahead=usually(0, 1, 2),
    edits=usually(False, True).flatmap(
        lambda yes: st.lists(edits, min_size=1, max_size=3) if yes else st.just([])
    ),
)


# What callers do ------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call that changes the index."""

    name: str
    rank: Rank
    other: Rank
    specs: dict[int, GroupSpec]

    def on(self, index: Any) -> None:
        if self.name == "add":
            index.add(self.rank)
        elif self.name == "remove":
            index.remove(self.rank)
        elif self.name == "exchange":
            index.rename({self.rank: self.other, self.other: self.rank})
        elif self.name == "rename":
            index.rename({self.rank: self.other})
        elif self.name == "describe":
            index.describe_groups(self.rank, self.specs)
        elif self.rank in index.ranks:
            index.tree(self.rank).clear()


specs = st.builds(
    GroupSpec, st.sampled_from(["full_attention", "mamba", "cross_attention"]), st.none()
) | st.builds(GroupSpec, st.just("sliding_window"), st.integers(1, 6))
calls = st.builds(
    Call,
    name=st.sampled_from(["add", "remove", "exchange", "rename", "describe", "clear"]),
    rank=st.sampled_from(list(RANKS)),
    other=st.sampled_from(list(RANKS)),
    specs=st.dictionaries(st.integers(0, 2), specs, max_size=2),
)


class Query(NamedTuple):
    """A question in one of the forms that tokens may have."""

    text: Sequence[int]
    length: int
    form: str
    options: dict[str, Any]

    def tokens(self) -> Any:
        tokens = list(self.text[: self.length]) if len(self.text) < 100 else list(self.text)
        try:
            return FORMS[self.form](tokens)
        except (OverflowError, ValueError):  # tokens that this form has no room for
            return tuple(tokens)


def _numpy(kind: str) -> Callable[[list[int]], Any]:
    try:
        import numpy
    except ImportError:
        return lambda tokens: tuple(tokens)
    return lambda tokens: numpy.array(tokens, dtype=kind)


def _range(tokens: list[int]) -> Any:
    if tokens != list(range(len(tokens))):
        raise ValueError("no range")
    return range(len(tokens))


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "range": _range,
    **{f"array {code}": partial(array, code) for code in "iIlLqQ"},
    "bytes": lambda tokens: array("I", tokens).tobytes(),
    "bytearray": lambda tokens: bytearray(array("I", tokens).tobytes()),
    "memoryview": lambda tokens: memoryview(array("q", tokens)),
    "unaligned": lambda tokens: memoryview(b"." + array("q", tokens).tobytes())[1:].cast("q"),
    **{f"numpy {kind}": _numpy(kind) for kind in ("int32", "uint32", "int64", "uint64")},
}
options = st.fixed_dictionaries(
    {},
    optional={
        "lora": usually(None, "lora", 7, "", 0, -5),
        "salt": usually(None, "salt"),
        "extra_keys": usually(
            None, [("image", 3)], [None, EXTRAS[1], ["lora", ("image", 3)], EXTRAS[3]], [EXTRAS[4]]
        ),
        "media": st.sampled_from([None, "gpu", ["CPU", "GPU"], ["cuda:0"], []]),
        "ranks": st.none() | st.lists(st.sampled_from(list(RANKS)), max_size=3),
        "block_size": st.sampled_from([None, 1, 2, 3, 300, 2**40]),
    },
)
queries = st.builds(
    Query,
    text=st.sampled_from([*TEXTS[:2] * 4, *TEXTS]),
    length=st.sampled_from([13, 13, *range(14)]),
    form=st.sampled_from(list(FORMS)),
    options=st.just({}) | options,
)
