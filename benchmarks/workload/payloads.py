"""What the ranks publish, as the bytes that each side takes.

kvindex and the plain dict take the engines' own payloads (msgpack, as vLLM 0.33 writes them);
Dynamo's RadixTree takes JSON, one event each, with its own hashes of the tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from benchmarks.workload.fleet import Change
from benchmarks.workload.segments import BLOCK_SIZE

TokensHash: TypeAlias = Callable[[list[int], int], list[int]]
"""Dynamo's `compute_block_hash_for_seq`: tokens and block size to a hash for each block."""

_TS: Final = 1_760_000_000.5
_MEDIUM: Final = "GPU"


class Message(NamedTuple):
    """The bytes of one batch (or, for RadixTree, of one event) and how many blocks it changes."""

    rank: int
    data: bytes
    blocks: int


class Piece(NamedTuple):
    """One event: a piece of a node. `tokens` is empty for a removal."""

    hashes: list[int]
    parent_hash: int | None
    tokens: list[int]
    stored: bool


class Encoder(Protocol):
    """Makes bytes of the events of one batch."""

    def encode(self, rank: int, pieces: Sequence[Piece]) -> bytes:
        """Return the bytes of one batch of a rank."""


def messages(
    changes: Iterable[Change],
    encoder: Encoder,
    *,
    event_blocks: int = 64,
    batch_events: int = 1,
) -> Iterator[Message]:
    """Yield the changes as batches of `batch_events` events of up to `event_blocks` blocks.

    What one request stores in a row is cut as if it were one text, so that only the last event
    and the last batch of it may be smaller.
    """
    for run in _runs(changes):
        rank = run[0].rank
        pieces = _pieces(run, event_blocks)
        for start in range(0, len(pieces), batch_events):
            batch = pieces[start : start + batch_events]
            blocks = sum(len(piece.hashes) for piece in batch)
            yield Message(rank, encoder.encode(rank, batch), blocks)


def _runs(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """Consecutive changes that an engine can tell as one: a chain stored, or any removed."""
    run: list[Change] = []
    for change in changes:
        if run and not _continues(run[-1], change):
            yield run
            run = []
        run.append(change)
    if run:
        yield run


def _continues(last: Change, change: Change) -> bool:
    if (last.rank, last.stored) != (change.rank, change.stored):
        return False
    return not change.stored or change.node.parent is last.node


def _pieces(run: list[Change], size: int) -> list[Piece]:
    if not run[0].stored:
        # Engines free a chain from its end.
        hashes = [block_hash for change in run for block_hash in change.node.hashes()[::-1]]
        return [
            Piece(hashes[i : i + size], None, [], stored=False) for i in range(0, len(hashes), size)
        ]
    hashes = [block_hash for change in run for block_hash in change.node.hashes()]
    tokens: list[int] = [token for change in run for token in change.node.tokens().tolist()]
    starts = range(0, len(hashes), size)
    parents = [run[0].node.parent_hash(), *hashes[size - 1 :: size]]
    return [
        Piece(hashes[i : i + size], parent, tokens[i * BLOCK_SIZE : (i + size) * BLOCK_SIZE], True)
        for i, parent in zip(starts, parents, strict=False)
    ]


class MsgpackEncoder:
    """Writes event batches as vLLM 0.33 does: an array of maps without what is default."""

    def __init__(self) -> None:
        import msgspec  # not in every peer's environment

        self._encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode

    def encode(self, rank: int, pieces: Sequence[Piece]) -> bytes:
        """Return the payload of one batch of a rank."""
        return self._encode([_TS, [_engine_event(piece) for piece in pieces], rank])


def _engine_event(piece: Piece) -> dict[str, Any]:
    if not piece.stored:
        return {"type": "BlockRemoved", "block_hashes": piece.hashes, "medium": _MEDIUM}
    return {
        "type": "BlockStored",
        "block_hashes": piece.hashes,
        "parent_block_hash": piece.parent_hash,
        "token_ids": piece.tokens,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": _MEDIUM,
        "lora_name": None,
    }


class DynamoEncoder:
    """Writes single events as Dynamo's RadixTree takes them."""

    def __init__(self, tokens_hash: TokensHash) -> None:
        self._tokens_hash = tokens_hash
        self._event_ids = itertools.count()

    def encode(self, rank: int, pieces: Sequence[Piece]) -> bytes:
        """Return the bytes of one event; whose it is, RadixTree is told beside them."""
        (piece,) = pieces
        event = {"event_id": next(self._event_ids), "dp_rank": 0, "data": self._data(piece)}
        return json.dumps(event, separators=(",", ":")).encode()

    def _data(self, piece: Piece) -> dict[str, Any]:
        if not piece.stored:
            return {"removed": {"block_hashes": piece.hashes}}
        tokens_hashes = self._tokens_hash(piece.tokens, BLOCK_SIZE)
        blocks = [
            {"block_hash": block_hash, "tokens_hash": tokens_hash}
            for block_hash, tokens_hash in zip(piece.hashes, tokens_hashes, strict=True)
        ]
        return {"stored": {"parent_hash": piece.parent_hash, "blocks": blocks}}
