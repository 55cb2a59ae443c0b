"""A paged prefix cache that works as an engine's does and reports every change as events.

It has no sockets. Its contents are known exactly (`truth`), so an index that is fed its
events can be held against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvindex.testing.blocks import (
    BlockPool,
    CacheKey,
    CacheOptions,
    Chain,
    CpuTier,
    Hasher,
    HashForm,
    Link,
    Lookup,
    Namespace,
    PromptKeys,
    ResidentPrefix,
    Served,
)
from kvindex.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvindex.wire.errors import ClosedError, ConfigurationError, TokenError

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Running:
    """A request that holds blocks: made by `PagedCache.begin`, ended by `PagedCache.finish`."""

    def __init__(self, chain: Chain, groups: int) -> None:
        self.chain = chain
        self.prompt_tokens = len(chain.token_ids)
        self.hit_tokens = 0
        self.loaded_tokens = 0
        self.finished = False
        self.tables: list[list[int | None]] = [[] for _ in range(groups)]
        self.stored = 0

    @property
    def served(self) -> Served:
        """The request's cost so far."""
        return Served(
            prompt_tokens=self.prompt_tokens,
            hit_tokens=self.hit_tokens,
            loaded_tokens=self.loaded_tokens,
            new_tokens=len(self.chain.token_ids) - self.prompt_tokens,
        )


class PagedCache:
    """Serve prompts from physical blocks with prefix caching and LRU eviction.

    Freed blocks join the tail of the free queue, the end of a prompt first, and can be hit until
    they leave its head. A prompt is never hit as a whole: the engine needs its last token computed,
    so a block-aligned prompt that is sent again stores its last block a second time.

    Args:
        num_blocks: physical GPU blocks, shared by all groups.
        block_size: tokens per block.
        cpu_blocks: blocks of the CPU tier; 0 for none.
        hash_form: how hashes appear in events.
        seed: of the hashes; None draws them anew.
        options: the rest.

    Thread safety: none; one owner at a time.

    Examples:
        >>> cache = PagedCache(num_blocks=8, block_size=4)
        >>> cache.serve(range(8)).hit_tokens
        0
        >>> cache.serve(range(8)).hit_tokens
        4
        >>> sorted(cache.truth().values())
        [1, 2]
    """

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        cpu_blocks: int = 0,
        hash_form: HashForm = "u64",
        seed: int | None = 0,
        options: CacheOptions | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1 or cpu_blocks < 0:
            raise ConfigurationError(
                f"num_blocks={num_blocks}, block_size={block_size} are at least 1, "
                f"cpu_blocks={cpu_blocks} at least 0"
            )
        self.options = options or CacheOptions()
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._hasher = Hasher(
            block_size, form=hash_form, seed=seed, lookahead=self.options.lookahead
        )
        self._pool = BlockPool(num_blocks)
        self._cpu = CpuTier(cpu_blocks)
        self._announcer = Announcer(block_size, self.options)
        self._running: set[Running] = set()

    # -- looking up --------------------------------------------------------------------------

    def hit(self, token_ids: Sequence[int], **keys: Unpack[PromptKeys]) -> int:
        """Return how many tokens of the prompt `serve` would find cached; changes nothing.

        Complexity: O(tokens).
        """
        return self._hit_blocks(self._chain(token_ids, **keys)) * self.block_size

    def lookup(self, token_ids: Sequence[int], **keys: Unpack[PromptKeys]) -> Lookup:
        """Return how much of the prompt is resident, the whole of it included.

        Complexity: O(tokens).
        """
        links = self._chain(token_ids, **keys).links
        blocks = self._leading(links)
        # A block on both media counts for each.
        places = {
            self._announcer.gpu: sum(self._pool.find(0, x) is not None for x in links[:blocks]),
            self._announcer.cpu: sum(self._cpu.has(0, x) for x in links[:blocks]),
        }
        return Lookup(
            blocks=blocks,
            tokens=blocks * self.block_size,
            by_medium={medium: count for medium, count in places.items() if count},
        )

    def truth(self) -> dict[CacheKey, int]:
        """Return what is resident: for each (block_hash, medium, group_idx) its copies."""
        return {
            (link.block_hash, medium, self._announcer.group_idx(group)): copies
            for group, link, copies, medium in self._contents()
        }

    def resident_prefixes(self) -> list[ResidentPrefix]:
        """Return every resident block with the tokens from the prompt's start through it.

        Complexity: O(blocks * prefix length).
        """
        prefixes: list[ResidentPrefix] = []
        for group, link, copies, medium in self._contents():
            path = list(link.path())[::-1]
            prefixes.append(
                ResidentPrefix(
                    block_hash=link.block_hash,
                    medium=medium,
                    group_idx=self._announcer.group_idx(group),
                    copies=copies,
                    prefix=[token for block in path for token in block.token_ids],
                    lookahead=list(link.lookahead),
                    lora=link.namespace.lora,
                    salt=link.namespace.salt,
                    extra_keys=[block.content for block in path],
                )
            )
        return prefixes

    def check(self) -> None:
        """Assert that the physical blocks add up.

        Raises:
            InvariantError: they do not; the message names the place.
        """
        # Counted anew from the requests: what the pool counts as it goes is what is in doubt.
        users = Counter(
            block
            for running in self._running
            for table in running.tables
            for block in table
            if block is not None
        )
        self._pool.check(users)

    # -- serving -----------------------------------------------------------------------------

    def serve(
        self,
        token_ids: Sequence[int],
        *,
        new_tokens: Sequence[int] = (),
        **keys: Unpack[PromptKeys],
    ) -> Served:
        """Serve one request from beginning to end.

        Raises:
            TokenError: there are no tokens.
            ConfigurationError: it needs more blocks than are free; nothing was changed.
        """
        # The last generated token never enters the cache: nothing was computed after it.
        fed = list(new_tokens[:-1])
        chain = self._chain(token_ids, **keys)
        self._check_room(chain, len(chain.token_ids) + len(fed))
        running = self._begin(chain)
        for token in fed:
            self.step(running, [token])
        self.finish(running)
        return msgspec.structs.replace(running.served, new_tokens=len(new_tokens))

    def begin(self, token_ids: Sequence[int], **keys: Unpack[PromptKeys]) -> Running:
        """Start a request: find its cached blocks, allocate and store the others.

        Raises:
            TokenError: there are no tokens.
            ConfigurationError: it needs more blocks than are free; nothing was changed.
        """
        chain = self._chain(token_ids, **keys)
        self._check_room(chain, len(chain.token_ids))
        return self._begin(chain)

    def step(self, running: Running, token_ids: Sequence[int]) -> None:
        """Let a running request compute further tokens.

        Raises:
            ClosedError: the request is finished.
            ConfigurationError: it needs more blocks than are free; nothing was changed.
        """
        if running.finished:
            raise ClosedError("the request is finished; begin another")
        total = len(running.chain.token_ids) + len(token_ids)
        # Checked before anything changes: an engine would preempt a request, which has no events.
        needed = sum(self._blocks(total) - len(table) for table in running.tables)
        if needed > self._pool.free:
            raise self._full(needed, self._pool.free)
        # What no later token attends to is released before new blocks are allocated, as in vLLM:
        # they may take those that leave.
        for group, table in zip(self.options.groups, running.tables, strict=True):
            if group.sliding_window is None:
                continue
            outside = max(0, len(running.chain.token_ids) - group.sliding_window + 1)
            count = min(outside // self.block_size, len(table))
            self._pool.release([block for block in reversed(table[:count]) if block is not None])
            table[:count] = [None] * count
        running.chain.extend(token_ids)
        self._grow(running)
        self._store_ready(running)

    def finish(self, running: Running) -> bool:
        """End a request: its blocks join the free queue, the last first.

        Returns whether it was running here. Idempotent.
        """
        if running not in self._running:  # finished already, or of a cache before this one
            return False
        running.finished = True
        self._running.discard(running)
        # The end of the prompt first: it is evicted first, and what others share stays longest.
        for table in running.tables:
            self._pool.release([block for block in reversed(table) if block is not None])
            table.clear()
        return True

    def clear(self, *, gpu_only: bool = False) -> None:
        """Forget everything cached; the event waits with the others for `take_events`.

        Args:
            gpu_only: keep the CPU tier, though the event reports that all is gone (vLLM's
                `reset_prefix_cache`).

        Raises:
            ConfigurationError: requests are running.
        """
        # vLLM refuses, too, to reset a cache of which requests hold blocks.
        if self._running:
            raise ConfigurationError(f"{len(self._running)} requests are running; finish them")
        self._pool.clear()
        if not gpu_only:
            self._cpu.clear()
        self._announcer.cleared()

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in causal order."""
        return self._announcer.drain()

    # -- finding -----------------------------------------------------------------------------

    def _chain(
        self,
        token_ids: Sequence[int],
        *,
        lora: str | None = None,
        salt: str | None = None,
        extra_keys: Sequence[Sequence[Any] | None] | None = None,
    ) -> Chain:
        if not len(token_ids):
            raise TokenError("token_ids is empty")
        keys = tuple(tuple(key) if key else None for key in extra_keys or ())
        return Chain(self._hasher, token_ids, Namespace(lora, salt, keys))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _hit_blocks(self, chain: Chain) -> int:
        # Never the whole prompt: the engine must compute its last token.
        return self._leading(chain.links[: (len(chain.token_ids) - 1) // self.block_size])

    def _leading(self, links: Sequence[Link]) -> int:
        """How many leading blocks every group can serve."""
        # A cut that one group makes may leave another one short of its window: until all agree.
        blocks, before = len(links), -1
        while blocks != before:
            before = blocks
            for group in range(len(self.options.groups)):
                blocks = self._fitting(group, links[:blocks])
        return blocks

    def _fitting(self, group: int, links: Sequence[Link]) -> int:
        """The longest cut that this group can serve."""
        # With a window only the blocks just before the cut are read: from the end, as vLLM looks.
        reach = self.options.groups[group].reach(self.block_size)
        present = [self._pool.find(group, x) is not None or self._cpu.has(group, x) for x in links]
        if reach is None:
            return present.index(False) if False in present else len(links)
        cut = len(links)
        while not all(present[max(0, cut - reach) : cut]):
            cut -= 1
        return cut

    def _first_needed(self, group: int, hit: int) -> int:
        reach = self.options.groups[group].reach(self.block_size)
        return 0 if reach is None else max(0, hit - reach)

    # -- holding -----------------------------------------------------------------------------

    def _check_room(self, chain: Chain, tokens: int) -> None:
        """Raise if so many tokens could not be held at once."""
        hit, needed, reused = self._hit_blocks(chain), 0, 0
        for group in range(len(self.options.groups)):
            first = self._first_needed(group, hit)
            copies = [self._pool.find(group, link) for link in chain.links[first:hit]]
            # Hit blocks in the free queue leave it: they are free now, and cannot be allocated.
            on_gpu = [block for block in copies if block is not None]
            needed += self._blocks(tokens) - first - len(on_gpu)
            reused += sum(self._pool.is_free(block) for block in on_gpu)
        if needed > self._pool.free - reused:
            raise self._full(needed, self._pool.free - reused)

    def _full(self, needed: int, free: int) -> ConfigurationError:
        return ConfigurationError(
            f"{needed} more blocks are needed and {free} of {self.num_blocks} are free: finish a "
            "running request or give the cache more num_blocks"
        )

    def _begin(self, chain: Chain) -> Running:
        running = Running(chain, len(self.options.groups))
        self._running.add(running)
        hit = self._hit_blocks(chain)
        running.hit_tokens = hit * self.block_size
        running.stored = hit
        loads = self._touch(running, hit)
        for group, positions in enumerate(loads):
            for position in positions:
                running.tables[group][position] = self._take()
        self._grow(running)
        # As in vLLM all blocks are allocated before any is stored: removals come first.
        for group, positions in enumerate(loads):
            self._store(running, group, positions)
        running.loaded_tokens = len(set().union(*loads)) * self.block_size
        self._store_ready(running)
        return running

    def _touch(self, running: Running, hit: int) -> list[list[int]]:
        """Use the hit blocks; return for each group the positions to load from the CPU tier."""
        loads: list[list[int]] = []
        for group, table in enumerate(running.tables):
            first = self._first_needed(group, hit)
            # Before its window a group holds nothing: vLLM puts a null block there.
            table.extend([None] * first)
            for link in running.chain.links[first:hit]:
                block = self._pool.find(group, link)
                if block is not None:
                    self._pool.touch(block)
                self._cpu.touch(group, link)
                table.append(block)
            loads.append([i for i in range(first, hit) if table[i] is None])
        return loads

    def _grow(self, running: Running) -> None:
        for table in running.tables:
            while len(table) < self._blocks(len(running.chain.token_ids)):
                table.append(self._take())

    def _take(self) -> int:
        """Allocate a physical block; its old contents are offloaded or gone."""
        # The CPU tier takes it over before it is gone: no moment in which it is nowhere.
        evicted = self._pool.next_evicted()
        if evicted is not None and self._cpu and self.options.offload == "evict":
            self._offload(*evicted)
        block, held = self._pool.allocate()
        if held is not None:
            self._announcer.removed(*held, self._announcer.gpu)
        return block

    def _store_ready(self, running: Running) -> None:
        """Store the blocks that became full, group by group."""
        full = len(running.chain.token_ids) // self.block_size
        ready = min(full, len(running.chain.links))
        for group in range(len(self.options.groups)):
            self._store(running, group, range(running.stored, ready))
        running.stored = max(running.stored, ready)

    def _store(self, running: Running, group: int, positions: Sequence[int]) -> None:
        """Store blocks of a request and announce them, one event for each unbroken run."""
        run: list[Link] = []
        for position in positions:
            link, block = running.chain.links[position], running.tables[group][position]
            # SGLang's tree has a place for each page; vLLM stores what is there already again.
            one_copy = self.options.engine == "sglang"
            if block is None or (one_copy and self._pool.find(group, link) is not None):
                continue
            self._pool.store(block, group, link)
            # An event names one parent: a gap in the chain begins another event.
            if run and run[-1] is not link.parent:
                self._announce(group, run)
                run = []
            run.append(link)
        self._announce(group, run)

    def _announce(self, group: int, run: list[Link]) -> None:
        self._announcer.stored(group, run, self._announcer.gpu)
        if self._cpu and self.options.offload == "store":
            for link in run:
                self._offload(group, link)

    def _offload(self, group: int, link: Link) -> None:
        if self._cpu.has(group, link):
            self._cpu.touch(group, link)  # a second copy there is no event
            return
        evicted = self._cpu.store(group, link)
        if evicted is not None:
            self._announcer.removed(*evicted, self._announcer.cpu)
        if self.options.placeholders:
            self._announcer.moved(group, link, self._announcer.cpu)
        else:
            self._announcer.stored(group, [link], self._announcer.cpu)

    # -- reporting ---------------------------------------------------------------------------

    def _contents(self) -> Iterator[tuple[int, Link, int, str]]:
        for group, link, copies in self._pool.contents():
            yield group, link, copies, self._announcer.gpu
        for group, link, copies in self._cpu.contents():
            yield group, link, copies, self._announcer.cpu


class Announcer:
    """The events that the cache announces, in the habits of the engine it plays, until drained."""

    def __init__(self, block_size: int, options: CacheOptions) -> None:
        self._block_size = block_size
        self._options = options
        self._vllm = options.engine == "vllm"
        self._pending: list[Event] = []
        self._lora_ids: dict[str, int] = {}
        self.gpu = "GPU"
        self.cpu = "CPU" if self._vllm else "CPU_PINNED"

    def group_idx(self, group: int) -> int | None:
        return group if self._vllm else None

    def drain(self) -> list[Event]:
        events, self._pending = self._pending, []
        return events

    def cleared(self) -> None:
        self._pending.append(AllBlocksCleared())

    def stored(self, group: int, links: Sequence[Link], medium: str) -> None:
        if self._options.single_hashes:
            for link in links:
                self._pending.append(self._stored(group, [link], medium))
        elif links:
            self._pending.append(self._stored(group, links, medium))

    def moved(self, group: int, link: Link, medium: str) -> None:
        """Announce a further place of a block by its hash alone."""
        self._pending.append(
            BlockStored(
                block_hashes=[link.block_hash],
                token_ids=[],
                block_size=0,
                medium=medium,
                group_idx=self.group_idx(group),
            )
        )

    def removed(self, group: int, link: Link, medium: str) -> None:
        """Announce that one copy of a block is gone."""
        # SGLang names all that one step removes in one event.
        last = self._pending[-1] if self._pending else None
        together = not self._vllm and not self._options.single_hashes
        if together and isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(link.block_hash)
            return
        self._pending.append(
            BlockRemoved(
                block_hashes=[link.block_hash], medium=medium, group_idx=self.group_idx(group)
            )
        )

    def _stored(self, group: int, links: Sequence[Link], medium: str) -> BlockStored:
        first, namespace = links[0], links[0].namespace
        lora_id = None
        if namespace.lora is not None and self._vllm:  # vLLM numbers adapters as it loads them
            lora_id = self._lora_ids.setdefault(namespace.lora, len(self._lora_ids) + 1)
        lookahead = self._options.lookahead
        kind = self._options.groups[group]
        return BlockStored(
            block_hashes=[link.block_hash for link in links],
            parent_block_hash=None if first.parent is None else first.parent.block_hash,
            token_ids=[token for link in links for token in link.token_ids],
            block_size=self._block_size,
            lora_id=lora_id,
            medium=medium,
            lora_name=namespace.lora,
            extra_keys=[self._extra_keys(link) for link in links] if self._vllm else None,
            group_idx=self.group_idx(group),
            kv_cache_spec_kind=kind.kind if self._vllm else None,
            kv_cache_spec_sliding_window=kind.sliding_window,
            lookahead_token_ids=[list(link.lookahead) for link in links] if lookahead else None,
            cache_salt=None if self._vllm else namespace.salt,
        )

    @staticmethod
    def _extra_keys(link: Link) -> tuple[Any, ...] | None:
        namespace = link.namespace
        # In vLLM's order: the adapter, what the block shows, the salt in the first block.
        keys: tuple[Any, ...] = () if namespace.lora is None else (namespace.lora,)
        keys += link.content or ()
        if namespace.salt is not None and link.depth == 0:
            keys += (namespace.salt,)
        return keys or None
