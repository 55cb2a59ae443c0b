"""A rank's contents as plain values: the form in which the Python index dumps them.

An image refers to blocks by *position*: the chains' keys one after the other. Reading an image
checks all that the index relies on, so that any restored image is whole, whatever its bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NoReturn, TypeAlias

import msgspec

from kvindex.wire import BlockHash, GroupSpec
from kvindex.wire.errors import ConfigurationError, SnapshotError

__all__ = [
    "CopiesImage",
    "GroupImage",
    "LabelImage",
    "OrphanImage",
    "PlacementImage",
    "RankImage",
    "WaitImage",
    "read_image",
    "write_image",
]

KEY_BYTES = 16
MAX_PLACES = 64  # distinct (medium, group) places of one rank
MAX_SHAPES = 16  # distinct (block size, lookahead): each namespace costs every query a walk
MAX_TAGS = 65  # unknown event tags counted by name, and the others
MAX_TORN = 65_536  # labels remembered as ambiguous; beyond it every parent counts as such

CopiesImage: TypeAlias = "list[tuple[int, int]]"
"""(place, count) of each place that has copies."""

PlacementImage: TypeAlias = "tuple[int, CopiesImage]"
"""A block's position, and its copies under one label."""

LabelImage: TypeAlias = "tuple[BlockHash, list[PlacementImage]]"
"""A hash and its blocks, the oldest first."""

OrphanImage: TypeAlias = "tuple[BlockHash, CopiesImage]"

WaitImage: TypeAlias = "tuple[int, BlockHash, int, bytes]"
"""An orphan by its number, its parent, namespace and content."""


class GroupImage(msgspec.Struct, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The facts about a group."""

    group_idx: int
    kind: bytes
    sliding_window: int | None
    attention_chunk_size: int | None
    configured: bool
    told: bool
    block_size: int

    def spec(self) -> GroupSpec:
        """Return its kind."""
        kind = self.kind.decode("utf-8", "surrogatepass")
        return GroupSpec(kind, self.sliding_window, self.attention_chunk_size)


class RankImage(msgspec.Struct, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """A rank's contents.

    Attributes:
        namespaces: block size, LoRA and lookahead, of blocks and orphans.
        places: (medium, group) of each owner.
        chains: for each chain of blocks the position of the block before it, or -1 - the number
            of its namespace, and its keys; parents come first.
        salted: the numbers of the chains that start prompts under a salt, or other extra keys.
        labels: in any order.
        orphans: the oldest first.
        waiting: those of them that know their parent, in the order in which they wait.
        groups: the facts about the KV cache groups.
        shapes: the (block size, lookahead) that were stored.
        torn: hashes of several blocks of which one went away.
    """

    namespaces: list[tuple[int, str | int | None, int]]
    places: list[tuple[bytes, int]]
    chains: list[tuple[int, bytes]]
    salted: list[int]
    labels: list[tuple[int | bytes, list[tuple[int, list[tuple[int, int]]]]]]
    orphans: list[tuple[int | bytes, list[tuple[int, int]]]]
    waiting: list[tuple[int, int | bytes, int, bytes]]
    groups: list[GroupImage]
    shapes: list[tuple[int, int]]
    torn: list[int | bytes]
    skipped: list[tuple[bytes, int]]
    counters: dict[str, int]
    ignored: dict[str, int]
    orphans_dropped: int
    orphans_forgotten: bool
    ambiguous: int
    duplicates: int
    unit: int
    reports_full: bool
    eagle: bool | list[int]
    hash_block_size: int | None
    upper_bound: bool
    resets_connector: bool
    positions_unknown: bool

    def resident(self) -> int:
        """Return how many resident (block, group) pairs it has."""
        group_of = [group_idx for _, group_idx in self.places]
        return sum(
            len({group_of[place] for place, _ in copies})
            for _, blocks in self.labels
            for _, copies in blocks
        )


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RankImage).decode


def write_image(image: RankImage) -> bytes:
    """Return an image as bytes.

    Raises:
        ConfigurationError: a number from a program does not fit 64 bits.
    """
    try:
        return _encode(image)
    except OverflowError:
        raise ConfigurationError(
            "the rank has a group_idx or a sliding window beyond 64 bits: it cannot be dumped"
        ) from None


def read_image(body: bytes | memoryview) -> RankImage:
    """Return the image in these bytes.

    Raises:
        SnapshotError: they are no image, or an impossible one.
    """
    try:
        image = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SnapshotError(f"no image of a rank: {error}", reason="content") from None
    _check_names(image)
    _check_blocks(image)
    _check_held(image)
    _check_learned(image)
    return image


def _check_names(image: RankImage) -> None:
    shapes = set(image.shapes)
    _require(len(shapes) == len(image.shapes) <= MAX_SHAPES, "shapes of blocks repeat")
    _require(all(size > 0 <= lookahead for size, lookahead in shapes), "blocks of no size")
    _require(_distinct(image.namespaces), "a namespace repeats")
    for block_size, lora, lookahead in image.namespaces:
        _require((block_size, lookahead) in shapes, "a namespace of an unknown shape")
        _require(lora is None or bool(lora), "a LoRA without a name")
    _require(len(image.places) <= MAX_PLACES and _distinct(image.places), "a place repeats")
    _require(_decodable(medium for medium, _ in image.places), "a medium that is no text")


def _check_blocks(image: RankImage) -> None:
    count = 0
    seen: set[tuple[int, bytes]] = set()
    for parent, keys in image.chains:
        _require(-len(image.namespaces) <= parent < count, "a chain after nothing")
        _require(bool(keys) and len(keys) % KEY_BYTES == 0, "a chain without whole keys")
        for start in range(0, len(keys), KEY_BYTES):
            seen.add((parent, keys[start : start + KEY_BYTES]))
            parent, count = count, count + 1
    _require(len(seen) == count, "a block repeats")
    _require(_distinct(image.salted), "a chain is salted twice")
    for number in image.salted:
        _require(0 <= number < len(image.chains), "no chain is salted")
        _require(image.chains[number][0] < 0, "a salt amid a prompt")


def _check_held(image: RankImage) -> None:
    blocks = sum(len(keys) // KEY_BYTES for _, keys in image.chains)
    needed = {parent for parent, _ in image.chains}
    _check_hashes([block_hash for block_hash, _ in image.labels])
    for _, placements in image.labels:
        positions = [position for position, _ in placements]
        _require(bool(positions) and _distinct(positions), "a label of no block, or of one twice")
        _require(all(0 <= position < blocks for position in positions), "a label of no block")
        needed.update(positions)
        for _, copies in placements:
            _check_copies(copies, image)
    stop = 0
    for _, keys in image.chains:
        stop += len(keys) // KEY_BYTES
        _require(stop - 1 in needed, "a chain that nobody needs")
    _check_hashes([block_hash for block_hash, _ in image.orphans])
    for _, copies in image.orphans:
        _check_copies(copies, image)
    _require(_distinct([number for number, *_ in image.waiting]), "an orphan waits twice")
    for number, _, namespace, _ in image.waiting:
        _require(0 <= number < len(image.orphans), "nobody waits")
        _require(0 <= namespace < len(image.namespaces), "an orphan of no namespace")


def _check_copies(copies: CopiesImage, image: RankImage) -> None:
    places = [place for place, _ in copies]
    _require(bool(copies) and _distinct(places), "a block in no place, or in one twice")
    for place, count in copies:
        _require(0 <= place < len(image.places) and count > 0, "no copy of a block, or no place")


def _check_hashes(hashes: list[BlockHash]) -> None:
    _require(_distinct(hashes), "a label repeats")
    for block_hash in hashes:
        whole = block_hash >= 0 if isinstance(block_hash, int) else bool(block_hash)
        _require(whole, "a label below 0, or of no bytes")


def _check_learned(image: RankImage) -> None:
    _require(_distinct([group.group_idx for group in image.groups]), "a group repeats")
    _require(_decodable(group.kind for group in image.groups), "a kind that is no text")
    _require(image.unit >= 0, "a unit below 0")
    for group in image.groups:
        _require(group.block_size >= 0, "a group of a block size below 0")
        _require(not group.block_size or image.unit > 0, "blocks without a unit")
        _require(group.told or not group.configured, "a kind that nobody told")
        _require(group.block_size % (image.unit or 1) == 0, "blocks of no whole units")
        try:
            group.spec()
        except ConfigurationError as error:
            raise SnapshotError(str(error), reason="content") from None
    _require(isinstance(image.eagle, bool) or min(image.eagle, default=0) >= 0, "no group drops")
    _require(image.hash_block_size is None or image.hash_block_size > 0, "hashes of no tokens")
    _check_hashes(image.torn)
    _require(len(image.torn) <= MAX_TORN, "too many torn labels")
    tags = [tag for tag, _ in image.skipped]
    _require(len(tags) <= MAX_TAGS and _distinct(tags), "too many tags, or one twice")
    _require(_decodable(tags), "a tag that is no text")
    _require(len(image.ignored) <= MAX_TAGS, "too many reasons")
    counts = [image.orphans_dropped, image.ambiguous, image.duplicates]
    counts += [*image.counters.values(), *image.ignored.values()]
    counts += [count for _, count in image.skipped]
    _require(min(counts) >= 0, "a count below 0")


def _distinct(items: Collection[object]) -> bool:
    return len(set(items)) == len(items)


def _decodable(texts: Iterable[bytes]) -> bool:
    try:
        for text in texts:
            text.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


def _require(truth: bool, what: str) -> None:
    if not truth:
        _refuse(what)


def _refuse(what: str) -> NoReturn:
    raise SnapshotError(f"the section says what cannot be: {what}", reason="content")
