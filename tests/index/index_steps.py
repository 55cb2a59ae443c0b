"""What may happen to an index, drawn so that it collides: few tokens, few labels, all dialects.

A `Told` is one event as a handful of choices; the size of its blocks and its lookahead come from
whoever sends it. Chains share texts, so that they meet, repeat, fork and leave holes; labels are
mostly true, at times shared by several blocks, or second ones of a block. Each run has a `Theme`:
few kinds of oddities at once, so that those meet often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
from hypothesis import strategies as st

from kvindex import AllBlocksCleared, BlockRemoved, BlockStored, EncodeError, EventBatch, Rank
from kvindex.wire import (
    DIALECTS,
    BlockHash,
    CacheSettings,
    Dialect,
    Event,
    GroupSpec,
    encode_batch,
)
from kvindex.wire.quirks import EMPTY_TUPLE_HASH, content_hash

RANKS = {Rank("a", 0): 2, Rank("a", 1): 2, Rank("b", 0): 3}  # block sizes, usually
TEXTS: tuple[tuple[int, ...], ...] = (
    (0,) * 13,
    (0, 0, 0, 0, 1, 2, 1, 2, 1, 2, 1, 0, 0),
    (0, 0, 1, 1, 0, 0, 2, 2, 0, 0, 0, 1),
    tuple(range(13)),
    (0, 0, -1, -7, 5, -(2**31), 0, 0, -1, -1, 3, 3),
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
    return st.sampled_from([value] * (4 * len(others)) + list(others))


def when(allowed: bool, value: Any, *others: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([value] * len(others) + list(others)) if allowed else st.just(value)


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
SCHEMES: tuple[tuple[str, ...], ...] = (
    *[("int",), ("digest",), ("int", "second"), ("digest", "second"), ("int", "shared")],
    *[("shared",), ("signed", "shared"), ("int", "content"), tuple(LABELS)],
)


def label(text: Sequence[int], size: int, block: int, scheme: str) -> BlockHash:
    stop = (block + 1) * size
    return LABELS[scheme](text[:stop], text[stop - size : stop])


# Events ---------------------------------------------------------------------------------------


class Group(NamedTuple):
    idx: int | None = None
    kind: str | None = None
    window: int | None = None


class Drawn(NamedTuple):
    """One event as choices."""

    what: str
    text: int
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
    copies_left: int | None

    @property
    def tokens(self) -> Sequence[int]:
        return TEXTS[self.text]

    def event(self, size: int, lookahead: int) -> Event:
        if self.what == "clear":
            return AllBlocksCleared()
        size = self.odd_size or size
        last = max(1, (len(self.tokens) - lookahead) // size)
        start = min(self.start, last - 1)
        blocks = range(start, min(start + self.length, last))
        hashes = [label(self.tokens, size, block, self.scheme) for block in blocks]
        if self.what == "remove":
            left = None if self.copies_left is None else [self.copies_left] * len(hashes)
            return BlockRemoved(
                block_hashes=hashes,
                medium=self.medium,
                group_idx=self.group.idx,
                remaining_copy_counts=left,
            )
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
        fields: dict[str, Any] = {
            "block_hashes": hashes,
            "parent_block_hash": self._parent(size, blocks.start),
            "token_ids": list(self.tokens[blocks.start * size : blocks.stop * size]),
            "block_size": size,
            "lora_name": self.lora[0],
            "lora_id": self.lora[1],
            "medium": self.medium,
            "group_idx": self.group.idx,
            "kv_cache_spec_kind": self.group.kind,
            "kv_cache_spec_sliding_window": self.group.window,
            "extra_keys": None if self.extras is None else self.keys(blocks),
            "cache_salt": self.salt,
        }
        if lookahead:
            stops = [(block + 1) * size for block in blocks]
            fields["lookahead_token_ids"] = [
                list(self.tokens[stop : stop + lookahead]) for stop in stops
            ]
        self._spoil(fields)
        return BlockStored(**fields)

    def keys(self, blocks: range) -> list[tuple[Any, ...] | None]:
        assert self.extras is not None
        return [EXTRAS[(self.extras + block) % len(EXTRAS)] for block in blocks]

    def _parent(self, size: int, start: int) -> BlockHash | None:
        named = {"none": None, "zero": 0, "empty tuple": EMPTY_TUPLE_HASH, "odd": 3, "bytes": b"?"}
        if self.parent in named:
            return named[self.parent]
        return label(self.tokens, size, start - 1, self.scheme) if start else None

    def _spoil(self, fields: dict[str, Any]) -> None:
        if self.fault == "tokens":
            fields["token_ids"].append(1)
        elif self.fault == "hashes":
            fields["block_hashes"] = []
        elif self.fault == "sparse":
            del fields["block_hashes"][::2]
            for name in ("extra_keys", "lookahead_token_ids"):
                if fields.get(name) is not None:
                    del fields[name][::2]
        elif self.fault == "size":
            fields["block_size"] = 0
        elif self.fault == "extras":
            fields["extra_keys"] = [("image",)] * 7
        elif self.fault == "lookahead":
            fields["lookahead_token_ids"] = [[1], [1, 2]]


LORAS = ((None, None), ("lora", None), (None, 7), ("lora", 7), ("", 0), (None, -5))
groups = st.sampled_from(
    [
        *[Group()] * 12,
        *[Group(0), Group(0, "full_attention"), Group(0, "sliding_window", 3), Group(2, "mamba")],
        *[Group(1), Group(1, "sliding_window", 4), Group(1, "sliding_window_mla", 5)],
        *[
            Group(1, "sliding_window"),
            Group(0, "full_attention", -7),
            Group(0, "new", 2**63),
            Group(4, "new", 2**31),
        ],
        *[Group(3, "encoder_only_attention"), Group(2**31 - 1)],
    ]
)


class Theme(NamedTuple):
    """What oddities one run has."""

    texts: Sequence[int]
    schemes: Sequence[str]
    ranks: Sequence[Rank]
    parents: bool
    media: bool
    groups: bool
    loras: bool
    extras: bool
    faults: bool
    sizes: bool
    lookahead: bool
    dialects: bool
    damage: bool


rarely = st.sampled_from([False, False, True])
themes = st.builds(
    Theme,
    texts=st.sampled_from([(0,), (0, 1), (0, 1, 2), (3, 4, 5), tuple(range(len(TEXTS)))]),
    schemes=st.sampled_from(SCHEMES),
    ranks=st.sampled_from([tuple(RANKS)[:1], tuple(RANKS)[:2], tuple(RANKS)]),
    **dict.fromkeys(Theme._fields[3:], rarely),
)


@cache
def drawings(theme: Theme) -> st.SearchStrategy[Drawn]:
    return st.builds(
        Drawn,
        what=st.sampled_from(["store"] * 20 + ["remove"] * 8 + ["locate", "locate", "clear"]),
        text=st.sampled_from(theme.texts),
        start=st.sampled_from([0, 0, 0, 1, 2, 3]),
        length=st.integers(1, 6),
        scheme=st.sampled_from(theme.schemes),
        parent=when(theme.parents, "before", "none", "zero", "empty tuple", "odd", "bytes"),
        medium=when(theme.media, None, "GPU", "CPU", "cpu", "cuda:0"),
        group=groups if theme.groups else st.just(Group()),
        lora=when(theme.loras, *LORAS),
        extras=when(theme.extras, None, *range(len(EXTRAS))),
        salt=when(theme.extras, None, "salt", ""),
        fault=when(theme.faults, None, "tokens", "hashes", "size", "extras", "lookahead", "sparse"),
        odd_size=when(theme.sizes, None, 1, 2, 3, 4, 300),
        copies_left=usually(None, 0, 1, 3),
    )


# Payloads -------------------------------------------------------------------------------------


class Edit(NamedTuple):
    at: int
    cut: int
    put: bytes


def damaged(data: bytes, edits: Sequence[Edit]) -> bytes:
    copy = bytearray(data)
    for at, cut, put in edits:
        at %= len(copy) + 1
        copy[at : at + cut] = put
    return bytes(copy)


class Sent(NamedTuple):
    """A payload of some engine, perhaps damaged on the way."""

    rank: Rank
    drawn: list[Drawn]
    dialect: Dialect | None
    lookahead: int
    unknown: list[str]
    named: bool
    edits: list[Edit]

    def payload(self) -> bytes:
        bigrams = self.dialect is not None and self.dialect.bigrams
        lookahead = 1 if bigrams else self.lookahead
        events = [event.event(RANKS[self.rank], lookahead) for event in self.drawn]
        payload = _encoded(events, self.dialect)
        if self.unknown or self.named:
            batch = msgspec.msgpack.decode(payload)
            batch[1] += [[tag, "GPU"] for tag in self.unknown]
            names = ("events", "ts", "data_parallel_rank")
            by_name = dict(zip(names, (batch[1], batch[0], None), strict=True))
            payload = msgspec.msgpack.encode(by_name if self.named else batch)
        return damaged(payload, self.edits)


def _encoded(events: list[Event], dialect: Dialect | None) -> bytes:
    if dialect is not None:
        try:
            return encode_batch(EventBatch(ts=1.5, events=events), dialect)
        except EncodeError:  # the dialect cannot say this: all that maps can be said in is a map
            pass
    return msgspec.msgpack.encode([1, events, None])


damages = st.lists(
    st.builds(Edit, at=st.integers(0, 2**16), cut=st.integers(0, 3), put=st.binary(max_size=4)),
    min_size=1,
    max_size=4,
)


@cache
def sendings(theme: Theme) -> st.SearchStrategy[Sent]:
    return st.builds(
        Sent,
        rank=st.sampled_from(theme.ranks),
        drawn=st.lists(drawings(theme), min_size=1, max_size=4),
        dialect=when(theme.dialects, None, *DIALECTS.values()),
        lookahead=when(theme.lookahead, 0, 1, 2),
        named=usually(False, True),
        unknown=usually([], ["BlockInactive"], ["TierBlocksCleared"], ["New", "BlockInactive"]),
        edits=usually([], None).flatmap(lambda none: damages if none is None else st.just(none))
        if theme.damage
        else st.just([]),
    )


# What callers do ------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call that changes the index."""

    name: str
    rank: Rank
    other: Rank
    cache: CacheSettings

    def on(self, index: Any) -> None:
        if self.name == "add":
            index.add(self.rank)
        elif self.name == "remove":
            index.remove(self.rank)
        elif self.name == "exchange":
            index.rename({self.rank: self.other, self.other: self.rank})
        elif self.name == "rename":
            index.rename({self.rank: self.other})
        elif self.name == "configure":
            index.configure(self.rank, self.cache)
        elif self.rank in index.ranks:
            index.tree(self.rank).clear()


specs = st.one_of(
    st.builds(
        GroupSpec, st.sampled_from(["full_attention", "mamba", "cross_attention"]), st.none()
    ),
    st.builds(GroupSpec, st.just("sliding_window"), st.integers(1, 6)),
    st.builds(GroupSpec, st.just("chunked_local_attention"), st.none(), st.integers(1, 6)),
)
calls = st.builds(
    Call,
    name=st.sampled_from(["add", "remove", "exchange", "rename", *["configure"] * 3, "clear"]),
    rank=st.sampled_from(list(RANKS)),
    other=st.sampled_from(list(RANKS)),
    cache=st.builds(
        CacheSettings,
        groups=st.dictionaries(st.integers(0, 2), specs, max_size=2),
        removals=st.sampled_from(["each", "last"]),
        report_mode=st.sampled_from(["incremental", "full"]),
        eagle=st.sampled_from([False, True, (0,), (1, 2)]),
        hash_block_size=st.sampled_from([None, None, 1, 2]),
        offload_chunk=st.sampled_from([None, None, 2, 4, 6]),
        upper_bound=st.booleans(),
        resets_connector=st.booleans(),
    ),
)
