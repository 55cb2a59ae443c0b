"""One simulated engine: chunked prefill beside decoding, in steps that take a modelled time."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass, field

from benchmarks.routing.cache import PrefixCache
from benchmarks.routing.traffic import BLOCK, Turn


@dataclass(frozen=True)
class Model:
    """What an engine can do.

    A step computes the next tokens of prompts, at most `chunk` less those of decoding, and one
    token of each sequence that decodes. It takes

        base + prompt tokens / prefill_rate + per_sequence × decoding sequences

    Attributes:
        prefill_rate: tokens per second.
        chunk: tokens that a step computes at most.
        base: seconds of every step.
        per_sequence: seconds of a step for each sequence that decodes.
        running: sequences that prefill or decode at a time.
        cache: tokens that its KV memory has room for.
    """

    prefill_rate: float = 22_000.0
    chunk: int = 8_192
    base: float = 0.008
    per_sequence: float = 0.000_15
    running: int = 256
    cache: int = 1_048_576

    def step(self, prompt_tokens: int, decoding: int) -> float:
        """Return the seconds that a step takes."""
        return self.base + prompt_tokens / self.prefill_rate + self.per_sequence * decoding


@dataclass(eq=False, slots=True)
class Job:
    """A request inside an engine.

    Attributes:
        turn: its prompt and answer.
        request: who asks: of no meaning here.
        hit: tokens that were found in the cache when the prefill began.
        left: prompt tokens that are still to be computed.
        pinned: cached blocks that it uses.
        own: blocks that it has beside these.
        gives: it keeps its blocks after its end, for another engine, until `Engine.release`.
        fetches: its prompt comes from another engine, but for the last token.
    """

    turn: Turn
    request: int
    hit: int = 0
    left: int = 0
    pinned: list[int] = field(default_factory=list)
    own: int = 0
    gives: bool = False
    fetches: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """A chain of blocks that became resident after `parent`."""

    parent: int | None
    names: list[int]


@dataclass(frozen=True, slots=True)
class Progress:
    """The results of a step.

    Attributes:
        first: sequences that have their first token now.
        finished: those that have their last.
        removed: blocks that went from the cache, before anything was stored.
        stored: chains that came into it.
    """

    first: list[Job]
    finished: list[Job]
    removed: list[int]
    stored: list[Stored]


class Engine:
    """An engine that serves first come, first served.

    Whoever owns it calls `advance` when `due` has come, and reads `due` anew after every call.

    Attributes:
        due: when the step that runs now ends; None while there is nothing to do. Steps that only
            decode are one stretch, up to the first of them that ends a sequence.
        busy: seconds spent in steps so far.
        gaps: how many tokens came so many seconds after the one before them, rounded to 0.1 ms.
        to_fetch: sequences that have room for what they fetch; whoever fetches it takes them out.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.cache = PrefixCache(model.cache // BLOCK)
        self.due: float | None = None
        self.busy = 0.0
        self.gaps: Counter[float] = Counter()
        self.to_fetch: deque[Job] = deque()
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._decoding: list[tuple[int, int, Job]] = []  # the step that ends it, a number
        self._plan: list[tuple[Job, int]] = []
        self._step = 0  # steps done
        self._steps = 1  # in the stretch that runs now
        self._begun = 0.0
        self._duration = 0.0  # of one step
        self._number = 0

    @property
    def sequences(self) -> list[Job]:
        """Everything that waits or runs here."""
        return [*self._waiting, *self._prefilling, *(entry[2] for entry in self._decoding)]

    def fits(self, turn: Turn) -> bool:
        """Return whether the engine could ever serve a request."""
        return -(-(turn.prompt + turn.output) // BLOCK) <= self.cache.capacity

    def submit(self, sequence: Job, now: float) -> None:
        """Take a request; it joins the step after the one that runs."""
        self._waiting.append(sequence)
        self._wake(now)

    def receive(self, sequence: Job, now: float) -> Progress:
        """Store what a sequence has fetched; the next step computes the last token."""
        progress = Progress([], [], self.cache.evicted, [])
        self.cache.evicted = []
        prompt = sequence.turn.prompt
        self._store(sequence, sequence.hit // BLOCK, prompt // BLOCK, progress)
        sequence.left = 1
        self._prefilling.append(sequence)
        self._wake(now)
        return progress

    def release(self, sequence: Job, now: float) -> None:
        """Give back the blocks that a sequence kept after its end."""
        self.cache.release(sequence.pinned, sequence.own)
        self._wake(now)  # what waits may have room now

    def _wake(self, now: float) -> None:
        if self.due is None:
            self._begin(now)
        elif self._steps > 1:
            done = int((now - self._begun) / self._duration) + 1
            self._steps = min(self._steps, done)
            self.due = self._begun + self._steps * self._duration

    def advance(self) -> Progress:
        """End the step that is due and begin the next one."""
        assert self.due is not None
        now, progress = self.due, Progress([], [], self.cache.evicted, [])
        self.cache.evicted = []
        self.busy += now - self._begun
        self.gaps[round(self._duration, 4)] += self._steps * len(self._decoding)
        self._step += self._steps
        for sequence, tokens in self._plan:
            self._computed(sequence, tokens, progress)
        while self._decoding and self._decoding[0][0] <= self._step:
            self._finish(heapq.heappop(self._decoding)[2], progress)
        self._begin(now)
        return progress

    def _begin(self, now: float) -> None:
        decoding = len(self._decoding)
        self._plan = self._prompts(self.model.chunk - decoding)
        tokens = sum(n for _, n in self._plan)
        self._begun = now
        self._duration = self.model.step(tokens, decoding)
        self._steps = 1 if self._plan or not decoding else self._decoding[0][0] - self._step
        self.due = now + self._steps * self._duration if self._plan or decoding else None

    def _prompts(self, budget: int) -> list[tuple[Job, int]]:
        """Share a step's tokens out: to prompts that were begun, then to those that wait."""
        plan: list[tuple[Job, int]] = []
        for sequence in self._prefilling:
            if budget <= 0:
                return plan
            tokens = min(sequence.left, budget)
            plan.append((sequence, tokens))
            budget -= tokens
        while budget > 0 and self._waiting and self._admit(self._waiting[0]):
            sequence = self._waiting.popleft()
            if sequence.fetches:
                self.to_fetch.append(sequence)
                continue
            self._prefilling.append(sequence)
            tokens = min(sequence.left, budget)
            plan.append((sequence, tokens))
            budget -= tokens
        return plan

    def _admit(self, sequence: Job) -> bool:
        """Look for the prompt in the cache and reserve room for all of its answer."""
        if len(self._prefilling) + len(self._decoding) >= self.model.running:
            return False
        turn = sequence.turn
        hit = self.cache.leading(turn.blocks[: (turn.prompt - 1) // BLOCK])
        own = -(-(turn.prompt + turn.output) // BLOCK) - hit
        pinned = list(turn.blocks[:hit])
        if not self.cache.take(pinned, own):
            return False
        sequence.hit = hit * BLOCK
        sequence.left = turn.prompt - sequence.hit
        sequence.pinned, sequence.own = pinned, own
        return True

    def _computed(self, sequence: Job, tokens: int, progress: Progress) -> None:
        done = sequence.turn.prompt - sequence.left
        sequence.left -= tokens
        self._store(sequence, done // BLOCK, (done + tokens) // BLOCK, progress)
        if sequence.left:
            return
        self._prefilling.remove(sequence)
        progress.first.append(sequence)
        if sequence.turn.output == 1:
            self._finish(sequence, progress)
        else:
            self._number += 1
            end = self._step + sequence.turn.output - 1
            heapq.heappush(self._decoding, (end, self._number, sequence))

    def _finish(self, sequence: Job, progress: Progress) -> None:
        turn = sequence.turn
        known = min(len(turn.blocks), (turn.prompt + turn.output - 1) // BLOCK)
        self._store(sequence, turn.prompt // BLOCK, known, progress)
        if not sequence.gives:
            self.cache.release(sequence.pinned, sequence.own)
        progress.finished.append(sequence)

    def _store(self, sequence: Job, begin: int, end: int, progress: Progress) -> None:
        names = sequence.turn.blocks[begin:end]
        new = self.cache.store(names)
        if not new:
            return
        sequence.own -= len(new)
        sequence.pinned += new
        parent = sequence.turn.blocks[begin - 1] if begin else None
        # Blocks that another sequence has stored meanwhile may stand among them.
        if len(new) == len(names):
            progress.stored.append(Stored(parent, new))
            return
        fresh = set(new)
        for place, name in enumerate(names, begin):
            if name in fresh:
                before = sequence.turn.blocks[place - 1] if place else None
                progress.stored.append(Stored(before, [name]))


def idle_ttft(model: Model, prompt: int, hit: int = 0) -> float:
    """Return the seconds to the first token on an engine that does nothing else."""
    new = prompt - hit
    return math.ceil(new / model.chunk) * model.base + new / model.prefill_rate
