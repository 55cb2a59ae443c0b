"""Why each rank's match of a prompt ends where it does: for people, not for routing."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from kvindex.index.match import Match, RankMatch, Trusts
from kvindex.index.questions import Question
from kvindex.index.tokens import Lora
from kvindex.index.views import Holding, Inspectable, main_group, union
from kvindex.wire import GroupSpec
from kvindex.wire.errors import UnknownRankError
from kvindex.wire.quirks import may_remove
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName, find_rank

Notes: TypeAlias = Callable[[Rank], Iterable[str]]
"""Returns what else may matter of a rank, in sentences."""


class Ending(str, enum.Enum):
    """Why a match ends.

    Attributes:
        WHOLE: it does not: every whole block of the prompt is a hit.
        SHORT: the prompt is shorter than one block.
        EMPTY: the rank holds nothing at all.
        BLOCK_SIZE: the question was for another block size than the rank's.
        PROMPTS: the same tokens are a longer hit under another LoRA or salt.
        MEDIA: more is resident on media that do not count.
        GROUP: another KV cache group of a hybrid model lacks blocks that a longer hit needs.
        HOLE: one or more blocks are missing; later ones are resident.
        END: nothing of the prompt is resident from there on.
        ENGINE: more is resident, but the engine's own rule cuts its hits shorter.
    """

    WHOLE = "whole"
    SHORT = "short"
    EMPTY = "empty"
    BLOCK_SIZE = "block_size"
    PROMPTS = "prompts"
    MEDIA = "media"
    GROUP = "group"
    HOLE = "hole"
    END = "end"
    ENGINE = "engine"

    def __str__(self) -> str:
        return self.value


class OtherPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """A longer hit of the same tokens. A salt itself is not shown: it is a secret of its user.

    Attributes:
        lora: LoRA of the prompts that were stored.
        salted: whether they start under a salt, or other extra keys of the first block.
        tokens: how long the hit would be.
    """

    lora: str | int | None
    salted: bool
    tokens: int


class GroupHeld(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a prompt that a KV cache group holds.

    Attributes:
        group_idx: which group.
        kind: its kind of attention.
        sliding_window: its window in tokens, if it has one.
        spans: the stretches of the prompt's tokens, [start, stop), that it holds.
    """

    group_idx: int
    kind: str
    sliding_window: int | None
    spans: tuple[tuple[int, int], ...]


class RankExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why one rank's match ends where it does.

    Attributes:
        match: what `match` answers for the rank.
        ending: why it ends there.
        text: the same in words.
        held: the part held by the group whose blocks are counted, on the media that count; None if
            the rank has stored nothing yet.
        limits: groups that lack blocks of `held`, for the ending "group".
        other: the longest hit under another LoRA or salt, if that is longer.
        notes: further notes: orphans, ignored blocks, a stream that is not live.
    """

    match: RankMatch
    ending: Ending
    text: str
    held: GroupHeld | None = None
    limits: tuple[GroupHeld, ...] = ()
    other: OtherPrompts | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.match.rank}: " + "; ".join((self.text, *self.notes))


class Explanation:
    """One `RankExplanation` for each rank, longest match first; a console prints it as text.

    Attributes:
        match: the `Match` that is explained.

    Thread safety: immutable.
    """

    __slots__ = ("_ranks", "match")

    def __init__(self, match: Match, ranks: Iterable[RankExplanation]) -> None:
        self.match = match
        self._ranks = {explained.match.rank: explained for explained in ranks}

    def __getitem__(self, rank: RankName) -> RankExplanation:
        """Return a rank's explanation.

        Raises:
            UnknownRankError: the rank is not known, or the question left it out.
        """
        return self._ranks[find_rank(rank, self._ranks)]

    def __iter__(self) -> Iterator[RankExplanation]:
        return iter(self._ranks.values())

    def __len__(self) -> int:
        return len(self._ranks)

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no ranks are known"

    __repr__ = __str__  # so that a console shows the explanation

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain JSON-ready values: each rank's explanation by `str(rank)`."""
        plain = self.match.to_dict()
        return {
            str(rank): {**msgspec.to_builtins(explained), "match": plain[str(rank)]}
            for rank, explained in self._ranks.items()
        }


# Explaining -------------------------------------------------------------------------------------


def explain(
    index: Inspectable,
    tokens: array[int],
    question: Question,
    trust: Trusts | None,
    notes: Notes | None,
) -> Explanation:
    """Return why each rank's match of a prompt ends; see `BaseIndex.explain`."""
    match, holdings = index._look(tokens, question, trust)
    negative = next(((place, token) for place, token in enumerate(tokens) if token < 0), None)
    facts = {
        rank_match.rank: _Facts(index, rank_match, question, len(tokens), negative)
        for rank_match in match
    }
    for holding in holdings:
        if holding.rank in facts:
            facts[holding.rank].holdings.append(holding)

    # The same tokens under each other LoRA and salt that a rank is known to have. A question is
    # asked once for all ranks that suggest it: each one walks the whole prompt.
    own = question.extras[0] if question.extras else b""
    tries: dict[tuple[Lora, bytes], list[Rank]] = {}
    for rank, of_rank in facts.items():
        if of_rank.whole:
            continue
        starts = {*of_rank.salts, *((lora, e) for lora in of_rank.loras for e in (b"", own))}
        for start in starts - {(question.lora, own)}:
            tries.setdefault(start, []).append(rank)
    for (lora, extra), ranks in tries.items():
        extras = [extra, *question.extras[1:]]
        other, _ = index._look(
            tokens, question._replace(lora=lora, extras=extras, ranks=None), None
        )
        for rank in ranks:
            if rank in other:
                facts[rank].note_answer(lora, extra, other[rank].tokens)
    return Explanation(match, [of_rank.explain(notes) for of_rank in facts.values()])


class _Kind(NamedTuple):
    """What kind of attention a group serves, and the tokens of its blocks."""

    spec: GroupSpec
    size: int


class _Facts:
    """The facts about one rank and a prompt."""

    def __init__(
        self,
        index: Inspectable,
        match: RankMatch,
        question: Question,
        length: int,
        negative: tuple[int, int] | None,
    ) -> None:
        self.match = match
        self.question = question
        self.length = length
        self.negative = negative
        self.holdings: list[Holding] = []
        self.other: OtherPrompts | None = None
        self.known: dict[str, Any] = {}
        self.loras: list[Lora] = []
        self.salts: list[tuple[Lora, bytes]] = []
        try:
            self.known = index._view_statistics(match.rank)
            self.loras, self.salts = index._view_origins(match.rank)
        except UnknownRankError:
            pass  # it was removed just now

    @property
    def whole(self) -> bool:
        size = self.match.block_size
        return bool(size) and self.match.tokens + size > self._countable

    @property
    def _countable(self) -> int:
        """How many tokens of the prompt can be in a block that has its lookahead tokens."""
        lookahead = min((holding.lookahead for holding in self.holdings), default=0)
        return max(0, self.length - lookahead)

    def note_answer(self, lora: Lora, extra: bytes, tokens: int) -> None:
        """Note the answer to another question."""
        if tokens > max(self.match.tokens, self.other.tokens if self.other else 0):
            self.other = OtherPrompts(lora=lora, salted=bool(extra), tokens=tokens)

    def explain(self, notes: Notes | None) -> RankExplanation:
        groups = self._groups(self.question.media)
        kinds = self._kinds()
        main = main_group(kinds) if kinds else None  # the group whose blocks the match counts
        asked_size = self.question.block_size
        held = groups.get(main) if main is not None else None
        leading = _leading(held)
        limits: tuple[GroupHeld, ...] = ()
        # The order is that of what a reader should look at first: a wrong question (block size,
        # LoRA, salt) explains more than a block that is missing.
        if self.whole and self.match.tokens:
            ending, text = Ending.WHOLE, "every whole block of the prompt is resident"
        elif not self.known:
            ending, text = Ending.EMPTY, "the rank was removed just now"
        elif not self.known["blocks"]:
            ending, text = Ending.EMPTY, "it holds nothing at all"
        elif asked_size not in (None, self.match.block_size) and not self.holdings:
            ending = Ending.BLOCK_SIZE
            text = (
                f"its blocks have {self.match.block_size} tokens, "
                f"not the {asked_size} of the question"
            )
        elif self._countable < self.match.block_size:
            ending = Ending.SHORT
            text = f"the prompt of {self.length} tokens is shorter than one block"
            text += f" of {self.match.block_size}"
        elif self.other is not None:
            ending, text = Ending.PROMPTS, self._other_prompts()
        elif leading - self.match.tokens >= self.match.block_size and held is not None:
            limits = _lacking(groups, kinds, leading)
            ending = Ending.GROUP if limits else Ending.ENGINE
            text = f"{_described(held)} holds the first {leading} tokens"
            for group in limits:
                stretches = f"tokens {_spelled(group.spans)}" if group.spans else "nothing"
                text += f", but {_described(group)} only {stretches}"
            text += "" if limits else ", but the engine's own rule allows a shorter hit only"
        elif self._on_other_media(main) > leading:
            ending = Ending.MEDIA
            text = f"on all media the first {self._on_other_media(main)} tokens are resident"
        else:
            ending, text = self._end(held)
        return RankExplanation(
            match=self.match,
            ending=ending,
            text=f"{self.match.tokens} of {self.length} tokens: {text}",
            held=held,
            limits=limits,
            other=self.other,
            notes=(*(notes(self.match.rank) if notes else ()), *self._notes()),
        )

    def _other_prompts(self) -> str:
        assert self.other is not None
        asked = f"LoRA {self.question.lora!r}" if self.question.lora else "no LoRA"
        lora = f"LoRA {self.other.lora!r}" if self.other.lora else "no LoRA"
        own = bool(self.question.extras and self.question.extras[0])
        salt = " and no salt" if own else ""
        if self.other.salted:
            which = "another salt" if own else "a salt"
            salt = f" and {which} (or other extra keys of the first block)"
        return f"asked with {asked}; with {lora}{salt} it would be {self.other.tokens}"

    def _end(self, held: GroupHeld | None) -> tuple[Ending, str]:
        size, tokens = self.match.block_size, self.match.tokens
        block = tokens // size if size else 0
        later = [span for span in (held.spans if held else ()) if span[0] > tokens]
        missing = f"block {block} (tokens {tokens} to {tokens + size - 1}) is not resident"
        if later:
            return Ending.HOLE, f"{missing}, later tokens are: {_spelled(later)}"
        if not tokens:
            return Ending.END, "nothing of the prompt is resident, from its first block on"
        return Ending.END, f"{missing}, nor is what follows"

    def _notes(self) -> Iterator[str]:
        match = self.match
        if match.tokens > match.device_tokens:
            on_device = f"{match.device_tokens} of these tokens are on the device"
            yield f"{on_device}; the engine decides whether it loads the rest"
        elif match.tokens and match.upper_bound:
            unknown = may_remove(self.known.get("skipped", {}))
            names = f"; some are of unknown kinds: {_counts(unknown)}" if unknown else ""
            yield f"an upper bound: its events do not report all that limits a hit{names}"
        if match.lower_bound:
            waiting = f" ({self.known['orphans']} wait)" if self.known.get("orphans") else ""
            yield f"a lower bound: blocks were left out, or have no known place{waiting}"
        if self.known.get("ignored"):
            yield f"blocks were ignored: {_counts(self.known['ignored'])}"
        strange = sorted((self.question.media or frozenset()) - self.known.get("media", {}).keys())
        if strange and self.known.get("blocks"):
            held = ", ".join(sorted(self.known["media"]))
            yield f"none of its blocks is on {' or '.join(strange)}; its media: {held}"
        if self.negative is not None:
            place, token = self.negative
            yield f"token {place} of the prompt is {token}: no engine has a negative token id"
        if self.other is None and not self.whole and self.known.get("salted"):
            yield (
                f"{self.known['salted']} of its blocks are under salts (or other first extra "
                f"keys); the last {len(self.salts)} of these were tried"
            )

    def _kinds(self) -> dict[int, _Kind]:
        """Return the groups that a hit depends on."""
        kinds = {
            int(idx): _Kind(
                GroupSpec(facts["kind"], facts["sliding_window"], facts["attention_chunk_size"]),
                facts["block_size"],
            )
            for idx, facts in self.known.get("groups", {}).items()
        }
        return {idx: kind for idx, kind in kinds.items() if kind.size and kind.spec.takes_part}

    def _groups(self, media: Collection[str] | None) -> dict[int, GroupHeld]:
        """Return the holdings of each group that takes part, on these media."""
        groups = {}
        for idx, (spec, size) in self._kinds().items():
            by_lookahead: dict[int, list[tuple[int, int]]] = {0: []}
            for holding in self.holdings:
                if holding.group_idx == idx and (media is None or holding.medium in media):
                    # Where a group's blocks are larger than those that the prompt was walked in,
                    # each stands at its end.
                    unit = holding.block_size
                    by_lookahead.setdefault(holding.lookahead, []).extend(
                        (max(0, (start + 1) * unit - max(unit, size)), stop * unit)
                        for start, stop in holding.spans
                    )
            # With and without lookahead tokens are two ways of hashing: a hit uses one of them.
            unions = [tuple(union(spans)) for spans in by_lookahead.values()]
            groups[idx] = GroupHeld(
                group_idx=idx,
                kind=spec.kind,
                sliding_window=spec.sliding_window,
                spans=max(unions, key=lambda union: sum(stop - start for start, stop in union)),
            )
        return groups

    def _on_other_media(self, main: int | None) -> int:
        if self.question.media is None or main is None:
            return 0
        return _leading(self._groups(None)[main])


def _leading(held: GroupHeld | None) -> int:
    """Return how many tokens are resident from the prompt's start."""
    return held.spans[0][1] if held is not None and held.spans and not held.spans[0][0] else 0


def _lacking(
    groups: Mapping[int, GroupHeld], kinds: Mapping[int, _Kind], leading: int
) -> tuple[GroupHeld, ...]:
    """Return the groups that lack blocks for a hit of so many tokens."""
    lacking = []
    for idx, group in groups.items():
        spec, size = kinds[idx]
        cut = leading - leading % size
        start = spec.needed_from(cut, size)
        start -= start % size  # a chunk may begin within a block
        if start < cut and not any(span[0] <= start and cut <= span[1] for span in group.spans):
            lacking.append(group)
    return tuple(lacking)


def _described(group: GroupHeld) -> str:
    window = f", window of {group.sliding_window} tokens" if group.sliding_window else ""
    return f"group {group.group_idx} ({group.kind}{window})"


def _counts(by_name: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(by_name.items()))


def _spelled(spans: Collection[tuple[int, int]]) -> str:
    words = [f"{start} to {stop - 1}" for start, stop in list(spans)[:8]]
    more = [f"and {len(spans) - 8} further stretches"] if len(spans) > 8 else []
    return ", ".join(words + more)
