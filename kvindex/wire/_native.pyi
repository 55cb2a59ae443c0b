"""The native core; see native/bindings. Use it through `kvindex.Index`."""

from array import array
from typing import Any

SECRET_BYTES: int
FINGERPRINT_SECRET_BYTES: int

class Fingerprints:
    """Hashes of payloads under secret words; any thread may ask."""

    def __init__(self, secrets: bytes) -> None: ...
    def of(self, payload: bytes) -> int: ...

class Intake:
    """Waits for sockets, and has armed lanes take what comes. Linux only; one thread calls it."""

    rounds: int

    def __init__(self, epoll: int, zmq_calls: list[int]) -> None: ...
    def wait(
        self, seconds: float, show_after: float, shows_at_once: bool
    ) -> tuple[list[int], list[int], list[int]]:
        """Return descriptors of sockets: Python must look; lanes have more; lanes have taken."""
    def longest_round(self) -> float:
        """Return the longest time between two waits since the last call, in seconds."""

class Lane:
    """Takes the expected batches of one stream into an index; the thread of its intake calls it."""

    has_taken: bool

    def __init__(
        self, intake: Intake, index: Index, fingerprints: Fingerprints, keeps_payloads: bool
    ) -> None: ...
    def arm(
        self,
        socket: int,
        monitor: int,
        descriptor: int,
        monitor_descriptor: int,
        rank: int,
        topic: bytes,
        seq: int,
        oldest_ts: float,
        is_named: bool,
    ) -> None: ...
    def disarm(self) -> None: ...
    def collect(self) -> tuple[int, int, list[float], list[int], list[bytes]]:
        """Return bytes received, first seq, timestamps, fingerprints, payloads since then."""
    def collect_left(self) -> list[list[bytes]]:
        """Return the messages received and not taken."""

class PackedBatch:
    """A decoded batch of events in native form."""

    def __init__(self) -> None: ...
    @property
    def ts(self) -> float: ...
    @property
    def data_parallel_rank(self) -> int | None: ...
    @property
    def dp_rank(self) -> int | None: ...
    def __len__(self) -> int: ...
    def stored(
        self,
        hashes: list[Any],
        parent: int | bytes | None,
        tokens: bytes,
        block_size: int,
        lora: bytes,
        medium: bytes,
        group_idx: int | None,
        spec_kind: bytes | None,
        spec_window: int | None,
        lookahead: list[bytes] | None,
        extras: list[bytes] | None,
        salted_first: bytes | None,
        content_hash: bool,
    ) -> None: ...
    @property
    def blocks(self) -> int: ...
    def removed(
        self, hashes: list[Any], medium: bytes, group_idx: int, copies_left: list[int] | None
    ) -> None: ...
    def cleared(self) -> None: ...
    def skipped(self, tag: bytes) -> None: ...

def decode(payload: bytes) -> PackedBatch | None: ...
def read_query(
    body: bytes | bytearray | memoryview, max_tokens: int
) -> tuple[bytes | None, bytes] | tuple[int, int, int]:
    """Return the packed tokens and the rest; or the fault, its byte, and the tokens before it."""

class AnswerWriter:
    """An answer's JSON for all instances at once; any thread may write."""

    def __init__(self, dialect: int, tenant: str, instances: list[tuple[str, list[str]]]) -> None:
        """Names, the tenant's too, are JSON strings with their quotes."""
    def write(
        self,
        device: array[int],
        host: array[int],
        tokens: array[int],
        trusts: tuple[bytes, ...] | None,
    ) -> bytes:
        """Return the answer; `trusts` is added to each instance's object, a comma first."""

def choose(
    prompt_tokens: int,
    hits: tuple[array[int], ...],
    loads: tuple[array[float], ...],
    usable: bytes | bytearray,
    weights: tuple[float, ...],
    chance: float,
    costs: array[float],
) -> tuple[int, int]:
    """Return row and attainable of a `Chosen`, and write the costs."""

def floor_convert(token_ids: Any) -> int: ...
def floor_hash(token_ids: Any, block_size: int) -> int: ...

_Found = tuple[int, int, int, int, dict[str, int], int, int, bool, bool]
"""rank id, blocks, tokens, block size, blocks by medium, device and host tokens, upper bound"""

_PrefixNode = tuple[int, int, int, int, int, bool, int, int, int]
"""parent, depth, blocks, namespace, holding, salted, children, left out, blocks left out"""

class RankRows:
    """Which row each of some ranks has."""

    def __init__(self, ids: list[int | None]) -> None: ...

class Answer:
    """What the ranks that hold anything of a prompt hold of it."""

    @property
    def best(self) -> _Found | None: ...
    def get(self, rank: int) -> _Found | None: ...
    def hits(
        self,
        rows: RankRows,
        live: bytes | bytearray | None,
        device: array[int],
        host: array[int],
        tokens: array[int],
        block_size: array[int],
    ) -> None:
        """Write the answer into columns that are all zero; see `Match.hits`."""
    def nothing(self, rank: int) -> tuple[int, bool]: ...
    def units(self) -> dict[int, int]: ...
    def longest(self) -> list[int]: ...

class Index:
    """The core; ranks are numbers that are never used twice."""

    def __init__(
        self,
        secrets: bytes,
        max_blocks: int | None,
        max_blocks_per_rank: int | None,
        max_orphans: int,
    ) -> None: ...
    def add(self) -> int: ...
    def remove(self, rank: int) -> bool: ...
    def clear(self, rank: int) -> bool: ...
    def configure(
        self,
        rank: int,
        groups: dict[int, tuple[str, int | None, int | None]],
        removes_last: bool,
        reports_full: bool,
        eagle: bool,
        eagle_groups: list[int],
        hash_block_size: int,
        offload_chunk: int,
        upper_bound: bool,
        resets_connector: bool,
    ) -> bool: ...
    def set_order(self, ranks: list[int]) -> None: ...
    def apply(self, rank: int, batch: object) -> int: ...
    def apply_entries(
        self, ranks: dict[bytes, int], entries: bytes | bytearray | memoryview
    ) -> tuple[int, list[bytes]] | None:
        """Apply the batches among a message's entries; return how many, and what is left."""
    def match(self, token_ids: Any, recomputed: int) -> Answer | None: ...
    def match_with(
        self,
        token_ids: Any,
        recomputed: int,
        lora: bytes,
        extras: list[bytes],
        media: list[bytes] | None,
        ranks: list[int] | None,
        block_size: int,
    ) -> Answer | None: ...
    def look(
        self,
        token_ids: Any,
        lora: bytes,
        extras: list[bytes],
        media: list[bytes] | None,
        ranks: list[int] | None,
        block_size: int,
    ) -> tuple[Answer, list[tuple[int, int, str, int, int, list[tuple[int, int]]]]]:
        """Return the answer, and what each rank holds of the prompt.

        For each rank, group, medium, block size and lookahead: stretches of blocks.
        """
    def salts(self, rank: int) -> list[tuple[bytes, bytes]] | None: ...
    def dump(self, rank: int) -> bytes | None: ...
    def restore(self, rank: int | None, body: memoryview) -> int | str | tuple[int, int, str]:
        """Return the rank's number, what is wrong with it, or (blocks, room, which limit)."""
    def key_check(self) -> int: ...
    def __len__(self) -> int: ...
    def size(self, rank: int) -> int | None: ...
    def statistics(self) -> dict[str, Any]: ...
    def rank_statistics(self, rank: int) -> dict[str, Any] | None: ...
    def stored_text(self) -> bool: ...
    def block_sizes(self, lora: bytes) -> list[int]: ...
    def walk(self, rank: int) -> list[tuple[Any, int, str, int, int, int, bytes]] | None: ...
    def prefixes(
        self, max_nodes: int, min_blocks: int, rows: list[int | None], only_rows: bool
    ) -> tuple[
        list[_PrefixNode],
        list[tuple[int, int, bytes]],
        dict[int, tuple[int, dict[str, bytes]]],
        _PrefixNode,
        int,
        int,
    ]:
        """Return nodes, namespaces, holdings, the root, children looked at and unique blocks.

        A namespace is (block size, lookahead, LoRA tag), a holding (ranks, rows by medium).
        """
    def check(self) -> str | None: ...

class RingWriter:
    """The writing party of a ring; for one thread at a time, but for what says otherwise.

    `spin` and `sleep` are seconds. A wait is over at a wake-up, too: it is called again.
    """

    state: int
    def __init__(
        self, memory: Any, n_reader: int, max_chunks: int, max_chunk_bytes: int
    ) -> None: ...
    @property
    def index(self) -> int:
        """The chunk that is next."""
    @property
    def seq(self) -> int:
        """The number of that chunk, counted from 0 without end."""
    def write(self, kind: int, data: Any, spin: float, sleep: float) -> bool:
        """Copy a buffer, or a list of them, into the next chunk and publish it; False: no room."""
    def wait(self, spin: float, sleep: float) -> bool:
        """Return whether the next chunk, that of `index`, may be written."""
    def wait_attached(self, sleep: float) -> bool:
        """Return whether every reserved place has its reader."""
    def publish(self, kind: int, length: int) -> None:
        """Publish the next chunk, written by the caller after `wait`."""
    def admit(self) -> int:
        """Let joiners in, from the next message on; return how many."""
    def awaited(self) -> list[int]:
        """Return the places of the readers that keep the next chunk from being written."""
    def remove(self, reader: int, evict: bool) -> bool:
        """Count a reader no more; False if it was not active. Any thread."""
    def reserve(self, reader: int) -> None:
        """Keep a place for a reader that will come; before any other party is there."""
    def slot_state(self, reader: int) -> int:
        """Return a `SlotState`. Any thread."""
    def interrupt(self) -> None:
        """Let a wait of another thread return. Any thread."""
    def statistics(self) -> dict[str, int]:
        """Return how often it spun, slept and woke others. Any thread."""

class RingReader:
    """A reading party of a ring; as `RingWriter`."""

    def __init__(
        self, memory: Any, n_reader: int, max_chunks: int, max_chunk_bytes: int, slot: int
    ) -> None: ...
    @property
    def index(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def active(self) -> bool:
        """Whether the writer counts this reader."""
    @property
    def evicted(self) -> bool:
        """Whether the writer took this reader off."""
    @property
    def behind(self) -> int:
        """Chunks published and not read yet."""
    @property
    def state(self) -> int:
        """The ring's state bits."""
    def attach(self) -> bool:
        """Take the place whose lock is held; return whether it had been reserved."""
    def leave(self) -> None:
        """Give the place up."""
    def read(self, limit: int, spin: float, sleep: float) -> tuple[int, Any] | None:
        """Return the next chunk's kind, and its bytes if they are at most `limit`.

        If they are more: their number, and the chunk stays taken until `release`. None: nothing
        came, or this reader was evicted meanwhile.
        """
    def release(self) -> None:
        """Give back the chunk that `read` left taken."""
    def ready(self) -> bool:
        """Return whether `read` has something to return."""
    def wait_state(self, bits: int, sleep: float) -> bool:
        """Return whether the ring's state has one of these bits."""
    def interrupt(self) -> None: ...
    def statistics(self) -> dict[str, int]: ...
