"""A stream of events from a process of its own: `python -m benchmarks.sides.records SPEC`.

The process that is measured for its memory must not hold the workload, so another one makes it
and writes it to a pipe. A record is a kind, a rank, a length and its bytes.
"""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np

from benchmarks.sides.adapter import create
from benchmarks.workload import (
    PROMPT_TOKENS,
    Encoder,
    Fleet,
    Prompt,
    Request,
    Source,
    is_long,
    messages,
)

EVENT: Final = 0  # bytes for `apply`
CHECKPOINT: Final = 1  # JSON: entries, unique_blocks
PROMPT: Final = 2  # a prompt and the right answer; they follow a checkpoint
END: Final = 3

_HEADER: Final = struct.Struct("<BII")


@dataclass(frozen=True)
class RecordSpec:
    """What the stream has.

    Attributes:
        side: whose events.
        source: arguments of the `Source`.
        ranks: how many.
        sticky: of the fleet's router.
        checkpoints: numbers of resident entries at which a checkpoint comes, ascending.
        prompts: long prompts that follow each checkpoint.
        empty: whether everything is removed after the last checkpoint.
    """

    side: str
    source: dict[str, Any]
    ranks: int
    sticky: float
    checkpoints: tuple[int, ...]
    prompts: int = 0
    empty: bool = False


class Record(NamedTuple):
    """One record: `rank` counts for an event only."""

    kind: int
    rank: int
    data: bytes

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint says."""
        facts: dict[str, Any] = json.loads(self.data)
        return facts

    def prompt(self) -> Prompt:
        """Return the prompt of a PROMPT record."""
        (count,) = struct.unpack_from("<I", self.data)
        depths = array("I", self.data[4 : 4 + 8 * count])
        tokens = np.frombuffer(self.data, dtype=np.uint32, offset=4 + 8 * count)
        return Prompt(tokens, dict(zip(depths[::2], depths[1::2], strict=True)))


def records(spec: RecordSpec) -> Iterator[Record]:
    """Start the process and yield its records."""
    command = [sys.executable, "-m", "benchmarks.sides.records", json.dumps(asdict(spec))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=1 << 20) as process:
        assert process.stdout is not None
        while True:
            header = process.stdout.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise RuntimeError("the process that makes the workload has failed")
            kind, rank, size = _HEADER.unpack(header)
            if kind == END:
                return
            yield Record(kind, rank, process.stdout.read(size))


def main() -> None:
    """Write the stream that the specification on the command line describes."""
    spec = RecordSpec(**json.loads(sys.argv[1]))
    with open(sys.stdout.fileno(), "wb", buffering=1 << 20, closefd=False) as out:
        _Writer(spec, out).write()


class _Writer:
    def __init__(self, spec: RecordSpec, out: BinaryIO) -> None:
        self._spec = spec
        self._out = out
        self._source = Source(**spec.source)
        self._fleet = Fleet(spec.ranks, seed=self._source.seed, sticky=spec.sticky)
        self._encoder: Encoder = create(spec.side).encoder()
        self._rng = random.Random(self._source.seed)
        self._long = 0

    def write(self) -> None:
        requests, sample = self._source.requests(), list[Request]()
        for target in self._spec.checkpoints:
            before = self._fleet.entries
            for request in requests:
                self._events(self._fleet.serve(request))
                self._sample(sample, request)
                if self._fleet.entries >= target:
                    break
            if self._fleet.entries == before:
                break  # a trace has ended
            self._checkpoint(sample)
        if self._spec.empty:
            self._events(self._fleet.empty())
            self._checkpoint([])
        self._put(END, 0, b"")

    def _events(self, changes: Any) -> None:
        for message in messages(changes, self._encoder):
            self._put(EVENT, message.rank, message.data)

    def _checkpoint(self, sample: list[Request]) -> None:
        facts = {"entries": self._fleet.entries, "unique_blocks": self._fleet.unique_blocks}
        self._put(CHECKPOINT, 0, json.dumps(facts).encode())
        for request in sample:
            tokens, depths = self._fleet.prompt(request.prompt, cut=PROMPT_TOKENS)
            pairs = array("I", [number for item in depths.items() for number in item])
            head = struct.pack("<I", len(depths)) + pairs.tobytes()
            self._put(PROMPT, 0, head + tokens.tobytes())

    def _sample(self, sample: list[Request], request: Request) -> None:
        """Keep a sample of the long requests, each as likely as any other."""
        if not self._spec.prompts or not is_long(request):
            return
        self._long += 1
        place = self._rng.randrange(self._long)
        if len(sample) < self._spec.prompts:
            sample.append(request)
        elif place < self._spec.prompts:
            sample[place] = request

    def _put(self, kind: int, rank: int, data: bytes) -> None:
        self._out.write(_HEADER.pack(kind, rank, len(data)))
        self._out.write(data)


if __name__ == "__main__":
    main()
