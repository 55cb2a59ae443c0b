"""An engine without a model: a real prefix cache whose changes are published as engines do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any

from kvindex.publish import ZmqEventPublisher
from kvindex.testing.blocks import (
    CacheKey,
    CacheOptions,
    HashForm,
    Lookup,
    PromptKeys,
    ResidentPrefix,
    Served,
)
from kvindex.testing.cache import PagedCache, Running
from kvindex.testing.ports import Outlet
from kvindex.testing.workload import Request
from kvindex.wire import LATEST, Dialect, Event, EventBatch
from kvindex.wire import dialect as dialect_named
from kvindex.wire.errors import ClosedError, ConfigurationError, TokenError
from kvindex.wire.rank import Rank

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FakeEngine:
    """Serve requests from a paged cache and publish every change in an engine's own words.

    As in the engines, endpoints are those of DP rank 0: rank r listens at port + r. So all ranks
    of an engine are given the same `endpoint` and `replay_endpoint`.

    Args:
        worker: the worker's id.
        dp_rank: its data-parallel rank.
        block_size: tokens per block.
        num_blocks: physical GPU blocks.
        cpu_blocks: blocks of the CPU tier; 0 for none.
        hash_form: how hashes appear in events; None for the dialect's own form.
        seed: of the hashes; None draws them anew.
        options: further properties of the cache; None for those of the dialect.
        dialect: the engine version to write as, or its name.
        endpoint: where DP rank 0 listens for subscribers; this engine listens at port + `dp_rank`.
            With port 0 the operating system chooses a port, which is kept until `close`. vLLM
            connects to a concrete host instead; this engine always listens.
        replay: whether to answer replay requests, on a port of its own.
        replay_endpoint: where DP rank 0 answers them; this engine at port + `dp_rank`.
        publish: False makes an engine without sockets; its events are in `events` alone.
        buffer_steps: batches kept for replay.
        hwm: batches queued for each subscriber.
        topic: first frame of every message.
        clock: of the batches' timestamps, in seconds.

    Raises:
        ConfigurationError: a value that cannot work, or a cache whose events the dialect cannot
            express: tiers without medium, groups without group_idx.

    Thread safety: all methods.

    Examples:
        >>> with FakeEngine(block_size=4, publish=False) as engine:
        ...     engine.serve([1, 2, 3, 4, 5]).hit_tokens, engine.serve([1, 2, 3, 4, 9]).hit_tokens
        (0, 4)
    """

    def __init__(
        self,
        worker: str = "fake-0",
        *,
        dp_rank: int = 0,
        block_size: int = 16,
        num_blocks: int = 256,
        cpu_blocks: int = 0,
        hash_form: HashForm | None = None,
        seed: int | None = 0,
        options: CacheOptions | None = None,
        dialect: Dialect | str = LATEST,
        endpoint: str = "tcp://127.0.0.1:0",
        replay: bool = True,
        replay_endpoint: str = "tcp://127.0.0.1:0",
        publish: bool = True,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        topic: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.rank = Rank(worker, dp_rank)
        self.dialect = dialect_named(dialect) if isinstance(dialect, str) else dialect
        # Before any socket is opened: a cache that the dialect cannot express is refused.
        options = _habits(self.dialect) if options is None else options
        _check(self.dialect, options, cpu_blocks)
        vllm = self.dialect.engine == "vllm"
        natural_form: HashForm = "u64" if vllm and self.dialect.has_bytes_hashes else "i64"
        self._make_cache = partial(
            PagedCache,
            num_blocks=num_blocks,
            block_size=block_size,
            cpu_blocks=cpu_blocks,
            hash_form=hash_form or natural_form,
            options=options,
        )
        self.topic = topic
        self.buffer_steps = buffer_steps
        self.hwm = hwm
        self._seed = seed
        self._cache = self._make_cache(seed=seed)
        self._clock = clock
        self._lock = threading.RLock()
        self._closed = False
        self._batches = 0
        self._events: tuple[Event, ...] = ()
        outlet = Outlet(
            self.dialect,
            dp_rank,
            (endpoint, replay_endpoint if replay else None),
            {"buffer_steps": buffer_steps, "hwm": hwm, "topic": topic},
        )
        self._outlet = outlet if publish else None
        self._start()

    @property
    def worker(self) -> str:
        """The worker's id."""
        return self.rank.worker

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._cache.block_size

    @property
    def num_blocks(self) -> int:
        """Physical GPU blocks."""
        return self._cache.num_blocks

    @property
    def publishes(self) -> bool:
        """Whether it has sockets for its events."""
        return self._outlet is not None

    @property
    def endpoint(self) -> str:
        """Where subscribers on this machine find live batches.

        Raises:
            ConfigurationError: the engine was made with publish=False.
        """
        return self._publisher.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where subscribers on this machine ask for replay; None if nowhere."""
        return self._publisher.replay_endpoint

    @property
    def published(self) -> int:
        """How many batches were published since the last restart; the next one's seq."""
        return self._batches

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of the last `flush` (of `serve`, mostly); empty if nothing had changed."""
        return self._events

    def serve(
        self,
        token_ids: Sequence[int],
        *,
        new_tokens: Sequence[int] = (),
        flush: bool = True,
        **keys: Unpack[PromptKeys],
    ) -> Served:
        """Serve one request and publish what changed as one batch.

        Args:
            token_ids: the prompt.
            new_tokens: what is generated.
            flush: False leaves the events for a later batch.
            keys: `lora`, `salt` and `extra_keys`, under which blocks are cached besides tokens;
                extra keys (of images, …) for each leading block, or None.

        Raises:
            TokenError: there are no tokens, or one is no integer of 64 bits.
            ConfigurationError: the request does not fit into the cache; nothing was changed.
            ClosedError: the engine is closed.
        """
        with self._lock:
            self._check_open()
            served = self._cache.serve(_tokens(token_ids), new_tokens=_tokens(new_tokens), **keys)
            if flush:
                self.flush()
            return served

    def pull(self, peer: FakeEngine, token_ids: Sequence[int], **keys: Unpack[PromptKeys]) -> int:
        """Store the blocks of a prompt that another engine holds and this one does not.

        The events wait for the next `flush`. Returns how many tokens these are. Raises as `serve`.
        """
        tokens = _tokens(token_ids)
        held = peer.hit(tokens, **keys)  # before our lock: the other one may pull from us
        with self._lock:
            self._check_open()
            missing = held - self._cache.hit(tokens, **keys)
            if missing > 0:
                self._cache.serve(tokens[:held], **keys)
            return max(0, missing)

    def prefill(
        self, token_ids: Sequence[int], *, flush: bool = True, **keys: Unpack[PromptKeys]
    ) -> Running:
        """Serve one request of one new token and keep its blocks in use until `release`.

        Args and errors: as of `serve`.
        """
        with self._lock:
            self._check_open()
            running = self._cache.begin(_tokens(token_ids), **keys)
            if flush:
                self.flush()
            return running

    def release(self, running: Running) -> bool:
        """Free what `prefill` keeps; return whether it did: not twice, nor after a restart."""
        with self._lock:
            return self._cache.finish(running)

    def run(self, workload: Iterable[Request]) -> list[Served]:
        """Serve the requests one after another and return what each cost."""
        return [
            self.serve(
                request.token_ids,
                lora=request.lora,
                salt=request.salt,
                new_tokens=request.new_tokens,
            )
            for request in workload
        ]

    def flush(self) -> EventBatch | None:
        """Publish the events that wait as one batch and return it; None if there are none."""
        # Under the lock: batches are published in the order in which the cache changed.
        with self._lock:
            self._check_open()
            events = self._cache.take_events()
            self._events = tuple(events)
            if not events:  # engines publish a step only if it changed something
                return None
            batch = EventBatch(self._clock(), events, self.rank.dp_rank)
            if self._outlet is not None:
                self._publisher.publish(batch)
            self._batches += 1
            return batch

    def clear(self, *, flush: bool = False, gpu_only: bool = False) -> None:
        """Forget everything cached.

        Args:
            flush: publish that at once. Engines do not: it leaves with the next step's batch.
            gpu_only: keep the CPU tier, though the event reports that all is gone.
        """
        with self._lock:
            self._check_open()
            self._cache.clear(gpu_only=gpu_only)
            if flush:
                self.flush()

    def hit(self, token_ids: Sequence[int], **keys: Unpack[PromptKeys]) -> int:
        """Return how many tokens of the prompt `serve` would find cached; changes nothing."""
        with self._lock:
            return self._cache.hit(_tokens(token_ids), **keys)

    def lookup(self, token_ids: Sequence[int], **keys: Unpack[PromptKeys]) -> Lookup:
        """Return how much of the prompt is resident, the whole of it included."""
        with self._lock:
            return self._cache.lookup(_tokens(token_ids), **keys)

    def truth(self) -> dict[CacheKey, int]:
        """Return what is resident: for each (block_hash, medium, group_idx) its copies."""
        with self._lock:
            return self._cache.truth()

    def resident_prefixes(self) -> list[ResidentPrefix]:
        """Return every resident block with the tokens from the prompt's start through it."""
        with self._lock:
            return self._cache.resident_prefixes()

    def statistics(self) -> dict[str, int]:
        """Return the publisher's counters; nothing with publish=False."""
        return {} if self._outlet is None else self._publisher.statistics()

    def restart(
        self, *, hard: bool = True, keep_ports: bool = True, new_hash_seed: bool = True
    ) -> None:
        """Become a new process: empty cache, seq from 0, nothing to replay.

        Args:
            hard: do not send what still waits.
            keep_ports: listen at the same endpoints again; otherwise at new ports where the
                operating system chose them.
            new_hash_seed: the same prompts get other hashes than before.
        """
        with self._lock:
            self._check_open()
            if self._outlet is not None:
                self._outlet.stop(hard=hard)
                if not keep_ports:
                    self._outlet.forget_ports()
            if new_hash_seed and self._seed is not None:  # None draws one each time
                self._seed += 1
            self._cache = self._make_cache(seed=self._seed)
            # The seq begins at 0 again, by which subscribers notice a restart.
            self._batches, self._events = 0, ()
            self._start()

    def close(self) -> None:
        """Send what waits, for at most a second, and close the sockets. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._outlet is not None:
                # The ports last: others may have them once the sockets are gone.
                self._outlet.stop(hard=False)
                self._outlet.forget_ports()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def _publisher(self) -> ZmqEventPublisher:
        if self._outlet is None:
            raise ConfigurationError("the engine was made with publish=False: it has no endpoints")
        if self._outlet.publisher is None:
            raise ClosedError("the engine is closed")
        return self._outlet.publisher

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")

    def _start(self) -> None:
        if self._outlet is not None:
            self._outlet.start()
        if self.dialect.engine == "sglang":  # its cache's constructor resets, and publishes that
            self._cache.clear()
            self.flush()


def _tokens(token_ids: Iterable[Any]) -> list[int]:
    """Return token ids as plain ints, whatever integers they were (numpy's, torch's)."""
    try:
        tokens = [index(token) for token in token_ids]
    except TypeError as error:
        raise TokenError(f"token ids must be ints: {error}") from None
    if tokens and not (min(tokens) >= -(1 << 63) and max(tokens) < 1 << 64):
        raise TokenError("a token id does not fit into 64 bits")
    return tokens


def _habits(dialect: Dialect) -> CacheOptions:
    """The cache that an engine of this dialect has."""
    sglang = dialect.engine == "sglang"
    # Since 0.5.18 SGLang names several pages in one event.
    coalesces = dialect.form == "map" or dialect.has_salt_metadata
    return CacheOptions(
        engine=dialect.engine,
        lookahead=1 if dialect.bigrams else 0,
        placeholders=not sglang,
        single_hashes=sglang and not coalesces,
    )


def _check(dialect: Dialect, options: CacheOptions, cpu_blocks: int) -> None:
    """Raise ConfigurationError if the dialect cannot express the events of such a cache."""
    name = dialect.name
    if options.engine != dialect.engine:
        raise ConfigurationError(f"options are for {options.engine}, the dialect is {name}")
    if dialect.bigrams and options.lookahead != 1:
        raise ConfigurationError(f"{name} has bigrams: options.lookahead must be 1")
    expresses = ("lookahead_token_ids" in dialect.stored) or dialect.bigrams
    if options.lookahead and not expresses:
        raise ConfigurationError(f"{name} cannot express lookahead: use vllm-0.33.0 or -eagle")
    if cpu_blocks and "medium" not in dialect.removed:
        raise ConfigurationError(f"{name} has no medium on the wire: use cpu_blocks=0")
    if len(options.groups) > 1 and "group_idx" not in dialect.removed:
        raise ConfigurationError(f"{name} has no group_idx on the wire: use one group")
