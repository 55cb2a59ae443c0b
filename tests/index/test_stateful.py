"""The index against the model, step by step: after each event every prompt seen is asked again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvindex import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Index, Rank
from kvindex.wire import BlockHash, CacheSettings, Event
from kvindex.wire.errors import ConfigurationError
from tests.examples import examples
from tests.index import index_prefixes
from tests.index.index_model import Content, Owner, Prompt, RankModel

pytestmark = pytest.mark.property

MEDIA = ("GPU", "CPU")


class Kind(NamedTuple):
    """How a rank's engine hashes, and the window in tokens of each of its groups."""

    block_size: int
    lookahead: int
    windows: tuple[int | None, ...]
    label: Callable[[int], BlockHash]
    offload_chunk: int | None = None


def _signed(number: int) -> int:
    return number - 2**63


def _digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


RANKS = {
    Rank("plain", 0): Kind(2, 0, (None,), int),
    Rank("plain", 1): Kind(3, 0, (None,), _signed),
    Rank("hybrid", 0): Kind(2, 0, (None, 4), _digest),
    Rank("windows", 0): Kind(2, 0, (3,), int),
    Rank("lookahead", 0): Kind(2, 1, (None,), _digest),
    Rank("chunks", 0): Kind(1, 0, (None,), int),
    Rank("chunks", 1): Kind(2, 0, (None,), int, offload_chunk=4),
}

media = st.sampled_from(MEDIA)
TEXTS = [(0,) * 11, (0, 0, 0, 0, 1, 2, 1, 2, 1, 2, 1), (0, 0, 1, 1, 0, 0, 2, 2, 0, 0, 0)]
texts = st.one_of(
    st.builds(lambda text, length: text[:length], st.sampled_from(TEXTS), st.integers(5, 11)),
    st.lists(st.integers(0, 2), min_size=2, max_size=11).map(tuple),
)
rarely = st.sampled_from([False, False, False, True])
prompts = st.builds(
    Prompt,
    texts,
    lora=rarely.map(lambda yes: "a" if yes else None),
    salt=rarely.map(lambda yes: "s" if yes else None),
    image=rarely.map(lambda yes: "digest" if yes else None),
)
ranks = st.integers(0, 5)
copies_left = st.sampled_from([None, None, 0, 1, 2])
starts = st.integers(0, 4)
counts = st.integers(1, 5)
wheres = st.tuples(starts, counts)  # the first block, and how many
owners = st.tuples(media, starts)  # a medium and a group
Where = tuple[int, int]


class IndexMachine(RuleBasedStateMachine):
    max_blocks: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(max_blocks=self.max_blocks)
        self.models: dict[Rank, RankModel] = {}
        self.seen: deque[Prompt] = deque(maxlen=20)
        self.numbers: dict[Content, int] = {}
        self.ranks = sorted(RANKS)

    @initialize(ranks=st.lists(st.sampled_from(sorted(RANKS)), min_size=1, max_size=3, unique=True))
    def choose_ranks(self, ranks: list[Rank]) -> None:
        self.ranks = ranks

    # Making events

    def hashes(self, rank: Rank, prompt: Prompt, size: int, stop: int) -> list[BlockHash]:
        """Label each block by the prompt up to its end, whatever the size of blocks."""
        kind = RANKS[rank]
        prefixes = [prompt.prefix((i + 1) * size, kind.lookahead) for i in range(stop)]
        return [
            kind.label(self.numbers.setdefault(prefix, len(self.numbers) + 1))
            for prefix in prefixes
        ]

    def rank(self, number: int) -> Rank:
        return self.ranks[number % len(self.ranks)]

    def model(self, rank: Rank) -> RankModel:
        if rank not in self.models:
            chunk = RANKS[rank].offload_chunk
            if chunk is not None:
                self.index.configure(rank, CacheSettings(offload_chunk=chunk))
            self.models[rank] = RankModel(chunk or 0)
        return self.models[rank]

    def apply(self, rank: Rank, *events: Event) -> None:
        self.model(rank)
        self.index.apply(rank, EventBatch(ts=0.0, events=list(events)))

    def remember(self, prompt: Prompt) -> None:
        if prompt not in self.seen:
            self.seen.append(prompt)

    def store_blocks(
        self, rank: Rank, prompt: Prompt, where: Where, owner: Owner, options: dict[str, Any]
    ) -> None:
        kind = RANKS[rank]
        medium, group = owner[0], owner[1] % len(kind.windows)
        size, lookahead = options.get("block_size", kind.block_size), kind.lookahead
        contents = prompt.contents(size, lookahead)
        if not contents:
            return
        self.remember(prompt)
        hashes = self.hashes(rank, prompt, size, len(contents))
        start = min(where[0], len(contents) - 1)
        stop = min(start + where[1], len(contents))
        window = kind.windows[group]
        # Sparse events leave out blocks, but neither tokens nor their place. Where groups have
        # blocks of several sizes, engines leave out others than these.
        sparse = options.get("sparse", False) and {*self.model(rank).sizes.values()} == {size}
        named = [i for i in range(start, stop) if i % 3 or not sparse]
        event = BlockStored(
            block_hashes=[hashes[i] for i in named],
            parent_block_hash=options.get("parent", hashes[start - 1] if start else None),
            token_ids=list(prompt.tokens[start * size : stop * size]),
            block_size=size,
            lora_name=prompt.lora,
            medium=medium,
            group_idx=group,
            kv_cache_spec_kind="full_attention" if window is None else "sliding_window",
            kv_cache_spec_sliding_window=window,
            lookahead_token_ids=[
                list(prompt.tokens[(i + 1) * size : (i + 1) * size + lookahead]) for i in named
            ]
            if lookahead
            else None,
            **self.extras(prompt, named, salt_apart=options.get("salt_apart", False)),
        )
        self.apply(rank, event)
        self.model(rank).apply("store", event, prompt, start, lookahead, (medium, group))

    @staticmethod
    def extras(prompt: Prompt, named: list[int], *, salt_apart: bool) -> dict[str, Any]:
        """Extra keys as vLLM sends them, or with the salt apart as SGLang does."""
        keys: list[tuple[Any, ...] | None] = [
            (prompt.lora,) if prompt.lora else None for _ in named
        ]
        if named and named[0] == 0:
            items = [prompt.image, None if salt_apart else prompt.salt, prompt.lora]
            keys[0] = tuple(item for item in items if item) or None
        return {
            "extra_keys": keys if any(keys) else None,
            "cache_salt": prompt.salt if salt_apart else None,
        }

    # Rules

    @rule(rank=ranks, prompt=prompts, count=counts, medium=media, apart=st.booleans())
    def store_from_the_start(
        self, rank: int, prompt: Prompt, count: int, medium: str, apart: bool
    ) -> None:
        for group in range(len(RANKS[self.rank(rank)].windows)):
            options = {"salt_apart": apart}
            self.store_blocks(self.rank(rank), prompt, (0, count), (medium, group), options)

    @rule(rank=ranks, prompt=prompts, where=wheres, owner=owners)
    def store_anywhere(self, rank: int, prompt: Prompt, where: Where, owner: Owner) -> None:
        self.store_blocks(self.rank(rank), prompt, where, owner, {})

    @precondition(lambda self: self.seen)
    @rule(rank=ranks, data=st.data(), where=wheres, owner=owners, sparse=st.booleans())
    def store_more_of_a_prompt(
        self, rank: int, data: st.DataObject, where: Where, owner: Owner, sparse: bool
    ) -> None:
        prompt = data.draw(st.sampled_from(list(self.seen)))
        self.store_blocks(self.rank(rank), prompt, where, owner, {"sparse": sparse})

    @rule(rank=ranks, prompt=prompts, start=starts, size=st.sampled_from([2, 3, 4]), owner=owners)
    def store_in_another_block_size(
        self, rank: int, prompt: Prompt, start: int, size: int, owner: Owner
    ) -> None:
        self.store_blocks(self.rank(rank), prompt, (start, 2), owner, {"block_size": size})

    @precondition(lambda self: self.numbers)
    @rule(number=ranks, data=st.data(), owner=owners)
    def say_where_a_block_is(self, number: int, data: st.DataObject, owner: Owner) -> None:
        rank, (medium, group) = self.rank(number), owner
        block_hash = data.draw(self.any_label(rank))
        group %= len(RANKS[rank].windows)
        where: dict[str, Any] = {"medium": medium.lower(), "group_idx": group}
        event = BlockStored(block_hashes=[block_hash], token_ids=[], block_size=0, **where)
        self.apply(rank, event)
        self.model(rank).apply("locate", event, (medium, group))

    @precondition(lambda self: any(model.copies for model in self.models.values()))
    @rule(data=st.data(), times=st.integers(1, 2), left=copies_left)
    def remove_what_is_there(self, data: st.DataObject, times: int, left: int | None) -> None:
        rank = data.draw(st.sampled_from(sorted(r for r, m in self.models.items() if m.copies)))
        keys = sorted(self.models[rank].copies, key=repr)
        block_hash, owner, _ = data.draw(st.sampled_from(keys))
        self.remove(rank, [block_hash] * times, owner, left)

    @precondition(lambda self: self.numbers)
    @rule(number=ranks, data=st.data(), owner=owners, left=copies_left)
    def remove_anything(
        self, number: int, data: st.DataObject, owner: Owner, left: int | None
    ) -> None:
        rank = self.rank(number)
        hashes = data.draw(st.lists(self.any_label(rank), min_size=1, max_size=4))
        self.remove(rank, hashes, (owner[0], owner[1] % len(RANKS[rank].windows)), left)

    def remove(self, rank: Rank, hashes: list[BlockHash], owner: Owner, left: int | None) -> None:
        event = BlockRemoved(
            block_hashes=hashes,
            medium=owner[0],
            group_idx=owner[1],
            remaining_copy_counts=None if left is None else [left] * len(hashes),
        )
        self.apply(rank, event)
        for block_hash in hashes:
            self.model(rank).apply("remove", block_hash, left, owner)

    def any_label(self, rank: Rank) -> st.SearchStrategy[BlockHash]:
        return st.integers(1, len(self.numbers) + 1).map(RANKS[rank].label)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def clear_event(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.models)))
        self.apply(rank, AllBlocksCleared())
        self.models[rank].apply("clear_told", ("GPU", 0))

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def clear_tree(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.models)))
        self.index.tree(rank).clear()
        self.models[rank] = RankModel(RANKS[rank].offload_chunk or 0)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def remove_rank(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.models)))
        self.index.remove(rank)
        del self.models[rank]

    # What must hold after each step

    @invariant()
    def sound(self) -> None:
        self.index.check()

    def answers(self, prompt: Prompt, media: set[str] | None) -> dict[Rank, tuple[int, Any]]:
        """Ask for all ranks at once; extra keys are per block, so each block size apart."""
        best: dict[Rank, tuple[int, Any]] = {}
        for size in (1, 2, 3, 4) if prompt.image else (None,):
            options: dict[str, Any] = {"block_size": size, "media": media}
            if prompt.image:
                options["extra_keys"] = [(prompt.image,)]
            try:
                match = self.index.match(
                    prompt.tokens, lora=prompt.lora, salt=prompt.salt, **options
                )
            except ConfigurationError:  # no rank has blocks of this size
                match = self.index.match([])
            for entry in match:
                before = best.get(entry.rank, (0, {}))
                best[entry.rank] = max(before, (entry.tokens, entry.by_medium), key=lambda a: a[0])
        return best


class ExactMachine(IndexMachine):
    """Without a limit: every answer is the model's."""

    @invariant()
    def same_residents(self) -> None:
        assert list(self.index.ranks) == sorted(self.models)
        assert len(self.index) == sum(model.size() for model in self.models.values())
        statistics = self.index.statistics()
        for rank, model in self.models.items():
            tree = self.index.tree(rank)
            resident = Counter(
                (block.block_hash, (block.medium, block.group_idx), block.copies, block.depth)
                for block in tree.walk()
            )
            assert resident == Counter(
                (h if isinstance(h, bytes) else h % 2**64, *held) for h, *held in model.resident()
            )
            assert len(tree) == model.size()
            assert statistics["ranks"][str(rank)]["orphans"] == len(model.held)

    @invariant()
    def same_prefixes(self) -> None:
        if self.index.backend != "native":
            return
        walk = self.index.prefixes(10_000)
        assert index_prefixes.shown(walk) == index_prefixes.expected(self.models)
        assert (walk.left_out, walk.left_out_blocks) == (0, 0)
        assert walk.looked_at == len(walk.nodes)
        assert walk.unique_blocks == sum(node.blocks for node in walk.nodes)

    @invariant()
    def same_answers(self) -> None:
        for prompt in self.seen:
            for media in (None, {"GPU"}, {"CPU"}):
                expected = {rank: m.match(prompt, media) for rank, m in self.models.items()}
                assert self.answers(prompt, media) == expected, (prompt, media)


class LimitedMachine(IndexMachine):
    """With `max_blocks`: never more than the limit, never more than the model."""

    max_blocks = 5

    @invariant()
    def never_more(self) -> None:
        assert len(self.index) <= 5
        for prompt in self.seen:
            for rank, (tokens, _) in self.answers(prompt, None).items():
                assert tokens <= self.models[rank].match(prompt)[0], prompt


@pytest.mark.parametrize("machine", [ExactMachine, LimitedMachine])
def test_index_agrees_with_the_model(machine: type[IndexMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(examples(40), stateful_step_count=25))
