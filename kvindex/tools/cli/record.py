"""`kvindex record`: what publishers send, frame by frame, to a file for each rank.

Write the frames that publishers send to files, untouched: one file for each rank, NAME.frames, or
NAME-WORKER-DP.frames if there are several. A file says which worker's rank it is; --endpoint
without --name is the worker NAME. Runs until Ctrl-C, which is its normal end (exit 0), as are
--limit and --seconds. Exit 1: --replay was given and a replay did not reach its end. The files hold
the prompts' tokens.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Literal

import zmq

from kvindex import ConfigurationError, DecodeError, EncodeError, Rank, SocketOptions, Worker
from kvindex.subscribe import PublisherAddress
from kvindex.tools.cli.arguments import count, option, seconds
from kvindex.tools.cli.endpoints import add_engine_options, asked_workers
from kvindex.tools.cli.output import Progress, counted
from kvindex.wire import RecordingWriter, parse_live, parse_replay, replay_request

_BURST = 256  # messages received from one socket before the others get their turn
_SUFFIX = ".frames"
_WARNING_INTERVAL = 10.0  # seconds between two lines on what a rank misses


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare this command's options."""
    text = "file to write; .frames is added if missing"
    parser.add_argument("output", metavar="NAME", help=text)
    option(parser, "--limit N", "end after N messages in all", count)
    option(parser, "--seconds S", "end after S seconds", seconds)
    text = "at the end, ask each replay endpoint for everything it still holds, and append it"
    option(parser, "--replay", text)
    text = "give a replay up after S seconds without a reply"
    option(parser, "--replay-timeout S", text, seconds, 5.0)
    option(parser, "--force", "overwrite files that exist")
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Record until there was enough, or Ctrl-C; then the replays, if asked for."""
    if arguments.endpoint and not arguments.name:  # files of several calls are several workers
        arguments.name = Path(arguments.output).name.removesuffix(_SUFFIX)
    workers, _ = asked_workers(arguments)
    if arguments.replay and not any(worker.replay for worker in workers):
        raise ConfigurationError(
            "--replay: no replay endpoint is named: NAME=ENDPOINT,replay=tcp://HOST:5657"
        )
    complete = True
    with ExitStack() as stack:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        recorders = []
        for worker, address, path in file_names(arguments.output, workers):
            file = stack.enter_context(_new(path, arguments.force))
            recorders.append(_RankRecorder(context, worker, address, file))
        try:
            for recorder in recorders:
                name = recorder.file.name
                print(f"recording {recorder.rank} to {name}", file=sys.stderr, flush=True)
            _record(recorders, arguments)
        except KeyboardInterrupt:
            pass  # the normal end of a recording
        if arguments.replay:
            for recorder in recorders:
                complete = recorder.add_replay(arguments.replay_timeout) and complete
    for recorder in recorders:
        print(f"{recorder.file.name}: {recorder.summary()}")
    return 0 if complete else 1


def file_names(
    output: str, workers: Sequence[Worker]
) -> list[tuple[Worker, PublisherAddress, Path]]:
    """Return each publisher with its file: a recording holds one.

    Raises:
        ConfigurationError: two ranks would share a file.
    """
    publishers = [(worker, address) for worker in workers for address in worker.publishers()]
    stem = output.removesuffix(_SUFFIX)
    if len(publishers) == 1:
        return [(*publishers[0], Path(stem + _SUFFIX))]
    named = []
    for worker, address in publishers:
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", worker.name)
        named.append((worker, address, Path(f"{stem}-{safe}-{address.dp_rank}{_SUFFIX}")))
    if len({path for _, _, path in named}) < len(named):
        raise ConfigurationError("two workers' names give the same file name: rename one")
    return named


def _new(path: Path, force: bool) -> BinaryIO:
    try:
        return path.open("wb" if force else "xb")
    except FileExistsError:
        raise ConfigurationError(f"{path} exists: choose another name, or --force") from None
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error}") from error


class _RankRecorder:
    """Writes one publisher's messages to a file."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        worker: Worker,
        address: PublisherAddress,
        file: BinaryIO,
    ) -> None:
        self.rank = Rank(worker.name, address.dp_rank)
        self.file = file
        self.live = self.replayed = self.bytes = 0
        self._worker = worker
        self._replay = address.replay
        self._context = context
        self._writer = RecordingWriter(file)
        # A file's name may change, and does not show where a worker's name ends.
        name = worker.name.encode(errors="replace")
        self._writer.write("publisher", [name, b"%d" % address.dp_rank])
        self._refused = self._missed = 0
        self._seq: int | None = None
        self._warn_again_at = -math.inf
        self.socket = self._open(zmq.SUB, address.endpoint, bind=worker.bind)
        self.socket.subscribe(worker.topic.encode())

    def _open(self, kind: int, endpoint: str, *, bind: bool = False) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        SocketOptions().configure(socket, self._worker.curve)
        try:
            (socket.bind if bind else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            verb = "bind to" if bind else "connect to"
            raise ConfigurationError(f"cannot {verb} {endpoint!r}: {error}") from error
        return socket

    def receive(self, limit: int) -> int:
        """Write the messages that are ready, at most `limit`; return how many."""
        received = 0
        while received < limit:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            received += 1
            self._note_seq(frames)
            self.live += self._write("live", frames)
        self.file.flush()
        return received

    def add_replay(self, timeout: float) -> bool:
        """Append what the publisher still holds; return whether the replay reached its end."""
        if self._replay is None:
            return True
        with self._open(zmq.DEALER, self._replay) as socket:
            socket.send_multipart(replay_request(0), zmq.NOBLOCK)
            while socket.poll(int(timeout * 1000)):
                frames = socket.recv_multipart()
                self.replayed += self._write("replay", frames)
                if _is_end(frames):
                    return True
        replies = counted(self.replayed, "reply", "replies")
        print(
            f"{self.rank}: replay from {self._replay} did not end within {timeout:g} s"
            f" after {replies}: is it the engine's replay_endpoint?",
            file=sys.stderr,
        )
        return False

    def _write(self, kind: Literal["live", "replay"], frames: list[bytes]) -> int:
        try:
            self._writer.write(kind, frames)
        except EncodeError:
            self._refused += 1
            return 0
        self.bytes += sum(map(len, frames))
        return 1

    def _note_seq(self, frames: list[bytes]) -> None:
        try:
            seq = parse_live(frames).seq
        except DecodeError:
            return  # recorded all the same: a recording shows what arrived
        if self._seq is not None and seq > self._seq:
            self._note_missed(seq - self._seq - 1)
        self._seq = seq

    def _note_missed(self, count: int) -> None:
        """Count messages that did not arrive, and print it, but not all the time."""
        self._missed += count
        now = time.monotonic()
        if count and now >= self._warn_again_at:
            self._warn_again_at = now + _WARNING_INTERVAL
            missed = counted(self._missed, "message")
            print(f"{self.rank}: {missed} missed by seq so far", file=sys.stderr, flush=True)

    def summary(self) -> str:
        """Return how much was recorded, and how much is known to be missing."""
        parts = [counted(self.live, "live message")]
        if self.replayed:
            parts.append(counted(self.replayed, "reply", "replies"))
        parts.append(counted(self.bytes, "byte"))
        if self._missed:
            parts.append(f"{self._missed} missed by seq")
        if self._refused:
            parts.append(f"{self._refused} too large to record")
        return ", ".join(parts)


def _is_end(frames: list[bytes]) -> bool:
    try:
        return parse_replay(frames).end
    except DecodeError:
        return False


def _record(recorders: list[_RankRecorder], arguments: argparse.Namespace) -> None:
    """Write what arrives until there are enough messages or the time is over."""
    started = time.monotonic()
    poller = zmq.Poller()
    for recorder in recorders:
        poller.register(recorder.socket, zmq.POLLIN)
    by_socket = {recorder.socket: recorder for recorder in recorders}
    progress = Progress()
    left = arguments.limit or float("inf")
    try:
        while left > 0:
            wait = 1.0
            if arguments.seconds:
                wait = min(wait, started + arguments.seconds - time.monotonic())
            if wait <= 0:
                return
            for socket, _ in poller.poll(int(wait * 1000) + 1):
                left -= by_socket[socket].receive(int(min(left, _BURST)))
            messages, size = sum(t.live for t in recorders), sum(t.bytes for t in recorders)
            progress.show(f"{counted(messages, 'message')}, {size / 1e6:.1f} MB; Ctrl-C ends")
    finally:
        progress.clear()
