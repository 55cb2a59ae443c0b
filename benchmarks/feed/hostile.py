"""`python -m benchmarks.feed.hostile KIND RATE`: publish the worst payloads known, at bytes/s.

Speaks JSON lines: says `{"endpoint": …}`, waits for its subscriber and for a line, then sends one
payload of the kind after the other until stdin ends.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
from collections.abc import Callable
from itertools import count, cycle
from typing import Any, Final

import msgspec
import zmq

_MOST_BLOCKS: Final = 1 << 17  # of one batch: what is above is refused at once
_RARE_BYTES: Final = (1 << 20) - 64  # of a payload that is not of the common forms: likewise
_LONG_BYTES: Final = (8 << 20) - 64  # of a message: likewise
_QUEUED: Final = 4  # messages that wait for a subscriber who does not read

_encode = msgspec.msgpack.encode


def _batch(*events: Any) -> bytes:
    return _encode([1.0, list(events), None])


def _stored(labels: list[int], parent: int | None, medium: str = "GPU") -> list[Any]:
    tokens = [number & 0x7F for number in range(len(labels))]
    return ["BlockStored", labels, parent, tokens, 1, None, medium]


def _array(items: int) -> bytes:
    return b"\xdd" + struct.pack(">I", items)


def _one_label() -> list[bytes]:
    """One label for very many blocks, told again after a parent."""
    return [_batch(_stored([5], None)), _batch(_stored([7] * _MOST_BLOCKS, 5))]


def _one_label_elsewhere() -> list[bytes]:
    """One label for very many blocks, removed from where they are not."""
    half = _MOST_BLOCKS // 2
    return [
        _batch(_stored([7] * half, None), _stored([9], None, "CPU")),
        _batch(["BlockRemoved", [7] * half, "CPU"]),
    ]


def _one_label_gone() -> list[bytes]:
    """One label for very many blocks in two places, which one removal takes away."""
    half = _MOST_BLOCKS // 2
    stored = [_stored([7] * half, None, medium) for medium in ("GPU", "CPU")]
    return [_batch(*stored), _batch(["BlockRemoved", [7], "GPU"], ["BlockRemoved", [7], "CPU"])]


def _own_labels(turn: int) -> list[int]:
    return list(range(1 + turn * _MOST_BLOCKS, 1 + (turn + 1) * _MOST_BLOCKS))


def _small_blocks() -> list[bytes]:
    """Very many blocks of one token, then all of them gone at once."""
    chains = [_stored(_own_labels(turn), turn * _MOST_BLOCKS or None) for turn in range(4)]
    return [*map(_batch, chains), _batch(["AllBlocksCleared"])]


def _many_labels() -> list[bytes]:
    """The same blocks under label after label."""
    return [
        *(_batch(_stored(_own_labels(turn), None)) for turn in range(4)),
        _batch(["AllBlocksCleared"]),
    ]


def _orphans() -> list[bytes]:
    """Very many blocks that wait for a parent, then the parent."""
    events = [["BlockStored", [label], 1, [label], 1] for label in range(2, _MOST_BLOCKS // 8)]
    return [_batch(*events), _batch(_stored([1], None))]


def _unknown_removed() -> list[bytes]:
    return [_batch(["BlockRemoved", list(range(_MOST_BLOCKS))])]


def _empty_arrays(size: int) -> list[bytes]:
    return [b"\x92\x01" + _array(size) + b"\x90" * size]


def _ignored_arrays() -> list[bytes]:
    """Empty arrays in a field nobody knows, beside what only the Python decoder reads."""
    event = b"\x84\xa4type\xacBlockRemoved\xacblock_hashes\x90\xa6medium\xa2\xc3\xa4\xa1z"
    return [b"\x92\x01\x91" + event + _array(_RARE_BYTES) + b"\x90" * _RARE_BYTES]


def _extra_keys() -> list[bytes]:
    head = b"\x92\x01\x91\x99" + _encode("BlockStored") + b"\x91\x01\xc0\x91\x01\x01\xc0\xc0\xc0"
    return [head + b"\x91" + _array(_RARE_BYTES) + b"\x01" * _RARE_BYTES]


def _text_tokens() -> list[bytes]:
    texts = [format(number, "x") for number in range(32_000)]
    return [_batch(["BlockStored", [1], None, texts, len(texts)])]


def _unknown_tags() -> list[bytes]:
    events = _LONG_BYTES // 3
    return [b"\x92\x01" + _array(events) + b"\x91\xa1a" * events]


KINDS: Final[dict[str, Callable[[], list[bytes]]]] = {
    "one label, stored again": _one_label,
    "one label, removed elsewhere": _one_label_elsewhere,
    "one label, removed": _one_label_gone,
    "blocks of one token, cleared": _small_blocks,
    "many labels of each block": _many_labels,
    "orphans": _orphans,
    "unknown blocks removed": _unknown_removed,
    "empty arrays, 1 MiB": lambda: _empty_arrays(_RARE_BYTES),
    "empty arrays, 8 MiB": lambda: _empty_arrays(_LONG_BYTES),
    "arrays in an ignored field": _ignored_arrays,
    "extra keys": _extra_keys,
    "tokens as text": _text_tokens,
    "unknown tags": _unknown_tags,
}
"""What a hostile engine may send, by name: its payloads, sent in turn."""


def main() -> None:
    """Publish until stdin ends."""
    payloads, rate = KINDS[sys.argv[1]](), float(sys.argv[2])
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
    socket.linger, socket.sndhwm = 0, _QUEUED
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    _say(endpoint=f"tcp://127.0.0.1:{port}")
    socket.recv()  # the subscription
    sys.stdin.readline()
    ended = threading.Event()

    def await_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=await_end, daemon=True).start()
    sent, started = 0, time.perf_counter()
    for seq, payload in zip(count(), cycle(payloads), strict=False):
        socket.send_multipart([b"", seq.to_bytes(8, "big"), payload])
        sent += len(payload)
        if ended.wait(max(0.0, started + sent / rate - time.perf_counter())):
            break


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
