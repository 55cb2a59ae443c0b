"""kvindex in 300 lines: which LLM engine holds the longest prefix of a prompt in its KV cache?

Engines (vLLM, SGLang) publish each block of tokens that enters or leaves their caches. This file
follows them with msgspec and pyzmq, and answers. Read it from top to bottom:

    1. events   what an engine sends, as bytes
    2. tree     the prompts of all engines, block by block, and who holds which block
    3. rank     one engine's events, applied to the tree
    4. stream   numbered batches over ZeroMQ: gaps, replay, restarts
    5. router   the question, and a choice

    python examples/nano.py vllm-0=tcp://host:5557,tcp://host:5657 < prompts.jsonl

It leaves out, and kvindex has: sliding windows and Mamba, EAGLE and lookahead hashing, tokens as
text, labels without a prefix (an engine that sends these is dropped with a reason, and holds
nothing); chunks off the device, images, blocks whose parents come later; restarts behind a loss;
bounds on memory, hostile input, wrong ports explained, speed. Where both answer, they agree.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec
import zmq

Event = dict[str, Any]
Label = int | bytes  # an engine's own name of a block, which no other engine understands

# 1. Events ----------------------------------------------------------------------------------------

# An event is a map, or from older engines an array whose values have this order.
STORED = "type block_hashes parent_block_hash token_ids block_size lora_id medium lora_name"
STORED += " extra_keys group_idx kv_cache_spec_kind"
REMOVED = "type block_hashes medium group_idx"


def decode(payload: bytes) -> tuple[float, list[Event]]:
    """Return a batch's timestamp and its events: as maps, with labels and media spelled alike."""
    timestamp, events, *_ = msgspec.msgpack.decode(payload)
    return timestamp, [_plain(event) for event in events]


def _plain(event: Event | list[Any]) -> Event:
    if isinstance(event, list):
        names = (STORED if event[0] == "BlockStored" else REMOVED).split()
        event = dict(zip(names, event, strict=False))
    hashes = [event.get("parent_block_hash"), *event.get("block_hashes", ())]
    # Without their signs, which may change on the way.
    parent, *labels = [label % 2**64 if isinstance(label, int) else label for label in hashes]
    medium = (event.get("medium") or "GPU").upper()
    return event | {"parent_block_hash": parent, "block_hashes": labels, "medium": medium}


# 2. Tree ------------------------------------------------------------------------------------------


class Node:
    """One block of a prompt. Equal prefixes are one path from the root, whoever holds them."""

    def __init__(self, parent: Node | None, content: Any) -> None:
        self.parent = parent
        self.content = content  # what the engine hashes: tokens, and a salt in the first block
        self.children: dict[Any, Node] = {}
        # Copies by medium. There may be two of a block that two requests compute side by side.
        self.holders: defaultdict[Rank, Counter[str]] = defaultdict(Counter)

    def drop(self, rank: Rank, medium: str, copies: int) -> None:
        self.holders[rank][medium] -= copies
        self.holders[rank] = +self.holders[rank]  # without what has no copy
        if not self.holders[rank]:
            del self.holders[rank]
        # A block that nobody holds stays while others follow it: a hole, which a match must see.
        node = self
        while node.parent and not (node.holders or node.children):
            del node.parent.children[node.content]
            node = node.parent


def tier(medium: str) -> int:
    """Return how far a medium is from the device: 0 the device, 1 the host's memory, 2 beyond."""
    on_host = medium in ("CPU", "CPU_PINNED")
    return 0 if medium.startswith(("GPU", "CUDA")) else 1 if on_host else 2


# 3. Rank ------------------------------------------------------------------------------------------


class Rank:
    """One engine, or one data-parallel rank of it: its labels, and the blocks that they name."""

    def __init__(self, name: str, roots: dict[Any, Node]) -> None:
        self.name, self.roots = name, roots  # the trees of all ranks, by block size and LoRA
        self.labels: dict[Label, Node] = {}
        self.block_size = 0
        self.fault = ""  # why its events cannot be followed

    def clear(self, but: Collection[str] = ()) -> None:
        """Forget what it holds, but on these media."""
        for label, node in list(self.labels.items()):
            for medium in node.holders.get(self, Counter()).keys() - set(but):
                self._drop(label, medium, node.holders[self][medium])

    def apply(self, events: list[Event]) -> None:
        """Apply a batch's events in order."""
        try:
            for event in events if not self.fault else ():
                if event["type"] == "BlockStored":
                    self._store(event)
                elif event["type"] == "BlockRemoved":
                    for label in event["block_hashes"]:
                        self._drop(label, event["medium"])
                elif event["type"] == "AllBlocksCleared":  # vLLM keeps what it has offloaded
                    self.clear(but=("CPU", "STORAGE", "FS", "OBJ"))
        except ValueError as error:
            self.clear()
            self.fault = str(error)

    def _store(self, event: Event) -> None:
        labels, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
        if not tokens:  # blocks that are known have a copy on a further medium
            for label in labels:
                if label in self.labels:
                    self.labels[label].holders[self][event["medium"]] += 1
            return
        self._check(event)
        self.block_size = size
        node = self.labels.get(event["parent_block_hash"])
        if event["parent_block_hash"] is None:
            prompts = size, event.get("lora_name") or event.get("lora_id")
            node = self.roots.setdefault(prompts, Node(None, None))
        for number, label in enumerate(labels):
            if node is None:
                return  # their prompt began before we joined: nobody can tell how
            content = (*tokens[number * size : (number + 1) * size], _extra(event, number))
            node = node.children.setdefault(content, Node(node, content))
            node.holders[self][event["medium"]] += 1
            self.labels[label] = node

    def _check(self, event: Event) -> None:
        labels, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
        kind = event.get("kv_cache_spec_kind") or "full_attention"
        if event.get("group_idx") or kind not in ("full_attention", "mla_attention"):
            raise ValueError("a model with several kinds of attention")
        if event.get("lookahead_token_ids") or not all(isinstance(token, int) for token in tokens):
            raise ValueError("blocks that depend on more than their own token ids")
        if len(tokens) != len(labels) * size or size != (self.block_size or size):
            raise ValueError("blocks of several sizes, or some without a label")
        if labels[0] == hash(tuple(tokens[:size])) % 2**64:
            raise ValueError("labels that do not depend on the prefix (SGLang up to 0.5.5)")

    def _drop(self, label: Label, medium: str, copies: int = 1) -> None:
        if label in self.labels:
            self.labels[label].drop(self, medium, copies)
            if self not in self.labels[label].holders:
                del self.labels[label]


def _extra(event: Event, number: int) -> frozenset[str]:
    """Return what a block's hash covers besides tokens: a salt where a prompt starts, an image."""
    keys = list((event.get("extra_keys") or {number: None})[number] or ())
    if number == 0 and event["parent_block_hash"] is None and event.get("cache_salt"):
        keys.append(event["cache_salt"])
    return frozenset(repr(key) for key in keys if key != event.get("lora_name"))


# 4. Stream ----------------------------------------------------------------------------------------

END = 2**64 - 1  # the number of the message that ends a replay


class Stream:
    """One publisher's numbered batches, for one rank. `ask(n)` replays them from number n on."""

    def __init__(self, rank: Rank, ask: Callable[[int], Iterator[tuple[int, bytes]]]) -> None:
        self.rank, self.ask = rank, ask
        self.next, self.last = 0, 0.0  # the next batch's number, the last one's timestamp
        self.complete = True

    def join(self) -> None:
        """Start afresh, with all that the engine still remembers."""
        self.rank.clear()
        self.rank.fault, self.rank.block_size = "", 0
        self.next, self.last, self.complete = 0, 0.0, True  # True: nothing was lost since then
        self._replay()

    def accept(self, number: int, payload: bytes) -> None:
        """Accept a live batch."""
        if number < self.next and decode(payload)[0] > self.last:
            self.join()  # the numbers fell back and time did not: the engine is a new process
        if number > self.next:
            self._replay()
        self._take(number, payload)

    def _replay(self) -> None:
        for number, payload in self.ask(self.next):
            self._take(number, payload)

    def _take(self, number: int, payload: bytes) -> None:
        if number < self.next:
            return  # it came twice
        if number > self.next:  # a gap that no replay fills: what is lost may have been removals
            self.rank.clear()
            self.complete = False
        self.last, events = decode(payload)
        self.next = number + 1
        self.rank.apply(events)


class Subscription:
    """The sockets of one publisher."""

    def __init__(self, rank: Rank, endpoint: str, replay: str) -> None:
        self._endpoint = replay
        self.live: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self.live.subscribe(b"")
        self.live.connect(endpoint)
        self.stream = Stream(rank, self._ask)
        self.stream.join()

    def receive(self) -> None:
        while self.live.poll(0):
            _, number, payload = self.live.recv_multipart()
            self.stream.accept(int.from_bytes(number, "big"), payload)

    def _ask(self, first: int) -> Iterator[tuple[int, bytes]]:
        dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        with dealer:
            dealer.linger = 0
            dealer.connect(self._endpoint)
            dealer.send_multipart([b"", first.to_bytes(8, "big")])
            while dealer.poll(2_000):
                *_, frame, payload = dealer.recv_multipart()
                if (number := int.from_bytes(frame, "big")) == END:
                    return
                yield number, payload


# 5. Router ----------------------------------------------------------------------------------------


class Nano:
    """All ranks: how much of a prompt does each hold, and which should serve it?"""

    def __init__(self) -> None:
        self.roots: dict[Any, Node] = {}
        self.ranks: list[Rank] = []
        self.queued: Counter[str] = Counter()  # tokens that each rank has still to compute

    def add(self, name: str) -> Rank:
        self.ranks.append(rank := Rank(name, self.roots))
        return rank

    def match(self, tokens: Sequence[int], lora: Any = None, salt: Any = None) -> dict[str, int]:
        """Return how many leading tokens of a prompt each rank holds."""
        return {rank.name: self._held(rank, tokens, lora, salt) for rank in self.ranks}

    def _held(self, rank: Rank, tokens: Sequence[int], lora: Any, salt: Any) -> int:
        node, size, start = self.roots.get((rank.block_size, lora)), rank.block_size, 0
        path = []  # for each block, the tiers that have it
        while node and start + size <= len(tokens):
            extra = frozenset([repr(salt)] if salt and not start else ())
            node = node.children.get((*tokens[start : start + size], extra))
            path.append({tier(m) for m in node.holders.get(rank, ())} if node else set())
            start += size
        held = 0
        for place in range(3):  # the device first; the host goes on where that ends, and so on
            while held < len(path) and place in path[held]:
                held += 1
        return held * size

    def choose(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Return the rank that would answer first, and how many tokens it has to compute."""
        held = self.match(tokens[:-1])  # an engine always computes the last token
        name = min(held, key=lambda name: self.queued[name] - held[name])
        self.queued[name] += (work := len(tokens) - held[name])  # take it back at the first token
        return name, work


def main() -> None:
    nano = Nano()
    engines = [argument.partition("=")[::2] for argument in sys.argv[1:]]
    subscriptions = [Subscription(nano.add(name), *ends.split(",")) for name, ends in engines]
    prompts = sys.stdin if engines else [str([*range(100)])]
    for name, blocks in () if engines else (("short", 2), ("long", 5)):
        stored = ["BlockStored", [*range(blocks)], None, [*range(blocks * 16)], 16]
        nano.add(name).apply(decode(msgspec.msgpack.encode([0.0, [stored]]))[1])
    for prompt in map(json.loads, prompts):
        for subscription in subscriptions:
            subscription.receive()
        held, (name, work) = nano.match(prompt), nano.choose(prompt)
        print(f"{held}: to {name}, which computes {work} of {len(prompt)} tokens")


if __name__ == "__main__":
    main()
