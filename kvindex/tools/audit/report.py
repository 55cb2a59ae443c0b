"""An audit's results, as plain values: the JSON that `kvindex audit --json` prints."""

from __future__ import annotations

import msgspec


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that ranks computed in the window, in whole blocks.

    `computed` is the sum of `unknown`, `here`, `elsewhere`, `unreachable`, `first`, and of
    `evicted` less `evicted_elsewhere`.

    Attributes:
        computed: the model ran over them: prompts and generated tokens.
        elsewhere: another counted rank held them, from the prompt's start on, and this one did not.
        same_worker: of `elsewhere`, those that another dp_rank of the same worker held.
        other_worker: of `elsewhere`, those that only other workers held.
        evicted: the same rank had held them, and had evicted them.
        evicted_elsewhere: those of `evicted` that are in `elsewhere`, too.
        here: the same rank held them, and computed them again all the same (a prompt's last block).
        unreachable: the same rank held them behind a block that it had evicted.
        again: some rank had computed them before, as far as the audit remembers: `elsewhere`, most
            of `evicted`, and what other ranks had evicted.
        first: nobody held them, as far as the audit saw.
        unknown: events leave out which prompt they belong to.
        alone: of `computed`, those in blocks that were stored one at a time, as generation does.
        returned: not computed: the rank held them off its device; they were loaded, or computed
            again, which events do not distinguish.
        offloaded: not computed: copied to the host or to storage.
        reannounced: not computed: announced again in report mode "full".
        moved: not computed: stored anew as SGLang before 0.5.6 split a node.
    """

    computed: int = 0
    elsewhere: int = 0
    same_worker: int = 0
    other_worker: int = 0
    evicted: int = 0
    evicted_elsewhere: int = 0
    here: int = 0
    unreachable: int = 0
    again: int = 0
    first: int = 0
    unknown: int = 0
    alone: int = 0
    returned: int = 0
    offloaded: int = 0
    reannounced: int = 0
    moved: int = 0


class Saving(msgspec.Struct, frozen=True):
    """The tokens that caches of another size would have saved.

    Attributes:
        factor: how many times as large as each rank's cache was seen to be.
        tokens: computed tokens that such a cache would still have held.
    """

    factor: float
    tokens: int


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What one cache for all ranks of a model would have held of the computed tokens.

    It holds what any rank holds, once, and in the rest of its room what was evicted last. So
    `Tokens.elsewhere` is at most its saving, and that at most `Tokens.again`.

    Attributes:
        size: tokens that all ranks together were seen to have room for.
        savings: by times of this size, from 1 on.
        forgotten: blocks that no rank holds any more and that were forgotten for newer ones.
    """

    size: int
    savings: list[Saving]
    forgotten: int


class Bar(msgspec.Struct, frozen=True):
    """One bar of a histogram.

    Attributes:
        up_to: its upper end; it begins 8.3 % below, and bars without weight are left out.
        weight: what it holds.
    """

    up_to: float
    weight: int


class Bucket(msgspec.Struct, frozen=True):
    """What was computed in one stretch of the window, in tokens; see `Tokens`."""

    computed: int
    elsewhere: int
    evicted: int
    unknown: int


class Duplication(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that the counted ranks hold at the end, on any medium.

    Attributes:
        resident: the sum over the ranks.
        unique: each prefix once.
        by_ranks: the i-th number is what exactly i + 1 ranks hold.
        unplaced: held by some rank, but events leave out which prompt it belongs to; in neither
            of the others.
    """

    resident: int
    unique: int
    by_ranks: list[int]
    unplaced: int


class SharedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that several counted ranks hold from its start to its end.

    Attributes:
        tokens: its length.
        ranks: how many hold it.
        names: which, at most 64 of them.
        first_tokens: how it begins; empty if that is not remembered.
    """

    tokens: int
    ranks: int
    names: list[str]
    first_tokens: list[int]


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rank.

    Attributes:
        rank: its name.
        model: by the caller, what it serves; "" if nothing.
        tokens: what it computed.
        block_size: tokens per block; 0 if it stored none.
        resident: tokens that it holds at the end, on any medium.
        unplaced: of `resident`, those of which events leave out what is before them.
        peak: the most tokens in use on its device, copies included: how large its cache was seen.
        evicted_known: evicted blocks that are remembered.
        evicted_forgotten: evicted blocks that were forgotten for newer ones.
        state: of its stream, at the end; "" for a recording.
        complete: whether every batch since its publisher's first was applied; None if unknown.
        counted: whether its contents count at the end: it is live, repairing or stale, or a
            recording's.
        away: seconds of the window in which they did not count.
        counts: losses, restarts and clears; blocks left out, by reason.
    """

    rank: str
    model: str
    tokens: Tokens
    block_size: int
    resident: int
    unplaced: int
    peak: int
    evicted_known: int
    evicted_forgotten: int
    state: str
    complete: bool | None
    counted: bool
    away: float
    counts: dict[str, int]


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit found.

    Attributes:
        format: 1; another number means other fields.
        version: of kvindex.
        source: what was audited, in words.
        began: when the window opened, in seconds since 1970.
        seconds: how long it was open.
        tokens: the sum over the ranks.
        ranks: each rank, sorted by name.
        savings: what larger caches would have saved, the smallest first.
        capacity: what one cache for all ranks would have saved.
        ages: tokens of `evicted` by the seconds since they were evicted.
        lifetimes: blocks that left in the window, by the seconds for which they were held.
        duplication: who holds the same at the end.
        shared: the most shared prefixes, by tokens × ranks, the largest first. None has half of its
            tokens in common with one before it.
        bucket_seconds: how long each of `series` is.
        series: what was computed over time.
        trust: what the figures do not cover, in words.
    """

    format: int
    version: str
    source: str
    began: float
    seconds: float
    tokens: Tokens
    ranks: list[RankReport]
    savings: list[Saving]
    capacity: Capacity
    ages: list[Bar]
    lifetimes: list[Bar]
    duplication: Duplication
    shared: list[SharedPrefix]
    bucket_seconds: float
    series: list[Bucket]
    trust: list[str]

    def without_tokens(self) -> AuditReport:
        """Return the report without any token of a prompt."""
        bare = [msgspec.structs.replace(prefix, first_tokens=[]) for prefix in self.shared]
        return msgspec.structs.replace(self, shared=bare)
