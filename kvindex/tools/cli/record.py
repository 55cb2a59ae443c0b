"""What publishers send, at once: `kvindex tail` prints it, `kvindex record` writes it to files."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Literal

import zmq

from kvindex import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ConfigurationError,
    DecodeError,
    EncodeError,
    EventBatch,
    EventStream,
    Rank,
    SocketOptions,
    Worker,
)
from kvindex.subscribe import (
    PublisherAddress,
    RankBatch,
    RankLost,
    RankRestarted,
    RanksRenamed,
    StreamItem,
)
from kvindex.tools.cli.arguments import count, option, seconds
from kvindex.tools.cli.engines import add_engine_options, asked_workers
from kvindex.tools.cli.output import Progress, StateChanges, counted, json_line, printable
from kvindex.wire import RecordingWriter, parse_live, parse_replay, replay_request

_LOOK = 0.5  # seconds between looks at which ranks are not live
_BURST = 256  # messages received from one socket before the others get their turn
_SUFFIX = ".frames"
_WARNING_INTERVAL = 10.0  # seconds between two lines on what a rank misses
_MOST_PARTS = 6  # of a batch's summary


# tail --------------------------------------------------------------------------------------------


def add_tail_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--json", "print one JSON object per line")
    option(parser, "--limit N", "end after N lines", count)
    option(parser, "--seconds S", "end after S seconds", seconds)
    add_engine_options(parser)


def run_tail(arguments: argparse.Namespace) -> int:
    """Print every rank's events in order, as they arrive.

    Print every rank's event batches in order, one line each, with losses and restarts between them;
    first what the publisher still holds for replay. Runs until Ctrl-C, which is its normal end
    (exit 0), as are --limit and --seconds.
    """
    totals: Counter[str] = Counter()
    workers, _ = asked_workers(arguments)
    try:
        with EventStream(workers) as stream:
            _print_items(stream, arguments, totals)
    except KeyboardInterrupt:
        pass  # the normal end of a tail
    # The summary goes to stderr: without a flush it would stand before the last lines.
    sys.stdout.flush()
    batches = counted(totals["RankBatch"], "batch", "batches")
    print(
        f"{batches} with {counted(totals['events'], 'event')}, "
        f"{counted(totals['RankLost'], 'loss', 'losses')}, "
        f"{counted(totals['RankRestarted'], 'restart')}",
        file=sys.stderr,
    )
    return 0


def _print_items(stream: EventStream, arguments: argparse.Namespace, totals: Counter[str]) -> None:
    until = time.monotonic() + (arguments.seconds or math.inf)
    look_at = time.monotonic() + _LOOK
    changes = StateChanges(stream.subscriber.statuses)
    while (now := time.monotonic()) < until:
        if now >= look_at:
            changes.report()
            look_at = now + _LOOK
        try:
            item = stream.get(min(until, look_at) - now)
        except TimeoutError:
            continue
        if not isinstance(item, RankBatch | RankLost | RankRestarted):
            continue
        totals[type(item).__name__] += 1
        totals["lines"] += 1
        totals["events"] += len(item.batch.events) if isinstance(item, RankBatch) else 0
        line = f"{time_of(item)}  {printable(describe(item))}"
        print(json_line(item) if arguments.json else line, flush=True)
        if totals["lines"] == arguments.limit:
            return


def time_of(item: StreamItem) -> str:
    """Return when a batch was made, by its publisher's clock; of anything else, the present."""
    ts = item.batch.ts if isinstance(item, RankBatch) else time.time()
    try:
        return time.strftime("%H:%M:%S", time.localtime(ts)) + f".{int(ts % 1 * 1000):03}"
    except (ValueError, OverflowError, OSError):
        return "--:--:--.---"  # a publisher's timestamp may be no time at all


def describe(item: StreamItem) -> str:
    """Return one line that describes an item.

    Examples:
        >>> from kvindex import Rank
        >>> describe(RankLost(Rank("vllm-0"), 0, "evicted", 5, 7, True))
        'vllm-0/0  epoch 0  LOST seq 5..7 (evicted): what the rank held is to be dropped'
    """
    if isinstance(item, RankBatch):
        how = "  (replayed)" if item.replayed else ""
        return f"{item.rank}  epoch {item.epoch}  seq {item.seq}  {_summary(item.batch)}{how}"
    if isinstance(item, RankLost):
        last = "?" if item.last_seq is None else item.last_seq
        then = "what the rank held is to be dropped" if item.reset else "kept, flagged incomplete"
        return (
            f"{item.rank}  epoch {item.epoch}  LOST seq {item.first_seq}..{last} "
            f"({item.reason}): {then}"
        )
    if isinstance(item, RankRestarted):
        return f"{item.rank}  epoch {item.epoch}  RESTARTED ({item.reason}): its cache is empty"
    if isinstance(item, RanksRenamed):
        names = ", ".join(f"{old} is {new}" for old, new in item.names)
        return f"RENAMED by their batches: {names}"
    return f"{item.rank}  {type(item).__name__}"


def _summary(batch: EventBatch) -> str:
    """Return what a batch has: blocks stored and removed on each medium, clears, unknown events."""
    parts: list[str] = []
    for event in batch.events:
        if isinstance(event, AllBlocksCleared):
            parts.append("all cleared")
        elif isinstance(event, BlockRemoved):
            parts.append(f"-{len(event.block_hashes)} {event.medium or 'GPU'}")
        elif isinstance(event, BlockStored):
            lora = event.lora_name or (event.lora_id is not None and f"id {event.lora_id}")
            parts.append(
                f"+{len(event.block_hashes)} {event.medium or 'GPU'} "
                f"({counted(len(event.token_ids), 'token')})" + (f" (LoRA {lora})" if lora else "")
            )
    if batch.skipped:
        parts.append(f"{len(batch.skipped)} unknown")
    more = len(parts) - _MOST_PARTS
    shown = ", ".join(parts[:_MOST_PARTS]) or "no events"
    return shown + (f", and {more} more events" if more > 0 else "")


# record ------------------------------------------------------------------------------------------


def add_record_options(parser: argparse.ArgumentParser) -> None:
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


def run_record(arguments: argparse.Namespace) -> int:
    """Write what publishers send, frame by frame, to a file for each rank.

    Write the frames that publishers send to files, untouched: one file for each rank, NAME.frames,
    or NAME-WORKER-DP.frames if there are several. A file says which worker's rank it is; --endpoint
    without --name is the worker NAME. Runs until Ctrl-C, which is its normal end (exit 0), as are
    --limit and --seconds. Exit 1: --replay was given and a replay did not reach its end. The files
    hold the prompts' tokens.
    """
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
        # It closes the sockets, too, whatever was raised.
        stack.callback(context.destroy, linger=0)
        recorders = []
        for worker, address, path in file_names(arguments.output, workers):
            try:
                file = stack.enter_context(path.open("wb" if arguments.force else "xb"))
            except FileExistsError:
                text = f"{path} exists: choose another name, or --force"
                raise ConfigurationError(text) from None
            except OSError as error:
                raise ConfigurationError(f"cannot write {path}: {error}") from error
            recorders.append(_RankRecorder(context, worker, address, file))
        try:
            for recorder in recorders:
                name = recorder.file.name
                print(f"recording {recorder.rank} to {name}", file=sys.stderr, flush=True)
            _record(recorders, arguments)
        except KeyboardInterrupt:
            pass  # the normal end of a recording
        # After the live messages, so that both overlap and nothing is between them.
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
    files = []
    for worker, address in publishers:
        # Names are chosen freely: a "/" in one must not lead to another folder.
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", worker.name)
        files.append((worker, address, Path(f"{stem}-{safe}-{address.dp_rank}{_SUFFIX}")))
    if len({path for _, _, path in files}) < len(files):
        raise ConfigurationError("two workers' names give the same file name: rename one")
    return files


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
        self._too_large = self._missed = 0
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
            try:
                self._note_seq(parse_live(frames).seq)
            except DecodeError:
                pass  # recorded all the same: a recording shows what arrived
            self.live += self._write("live", frames)
        # A recording that is killed, or read meanwhile, has all but the last moments.
        self.file.flush()
        return received

    def _note_seq(self, seq: int) -> None:
        """Count messages that did not arrive, and print it, but not all the time."""
        missing = 0 if self._seq is None else max(0, seq - self._seq - 1)
        self._seq = seq
        self._missed += missing
        now = time.monotonic()
        if missing and now >= self._warn_again_at:
            self._warn_again_at = now + _WARNING_INTERVAL
            missed = counted(self._missed, "message")
            print(f"{self.rank}: {missed} missed by seq so far", file=sys.stderr, flush=True)

    def add_replay(self, timeout: float) -> bool:
        """Append what the publisher still holds; return whether the replay reached its end."""
        if self._replay is None:
            return True
        with self._open(zmq.DEALER, self._replay) as socket:
            socket.send_multipart(replay_request(0), zmq.NOBLOCK)
            while socket.poll(int(timeout * 1000)):
                frames = socket.recv_multipart()
                self.replayed += self._write("replay", frames)
                try:
                    if parse_replay(frames).end:
                        return True
                except DecodeError:
                    pass  # recorded all the same, as above
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
            self._too_large += 1
            return 0
        self.bytes += sum(map(len, frames))
        return 1

    def summary(self) -> str:
        """Return how much was recorded, and how much is known to be missing."""
        parts = [counted(self.live, "live message")]
        if self.replayed:
            parts.append(counted(self.replayed, "reply", "replies"))
        parts.append(counted(self.bytes, "byte"))
        if self._missed:
            parts.append(f"{self._missed} missed by seq")
        if self._too_large:
            parts.append(f"{self._too_large} too large to record")
        return ", ".join(parts)


def _record(recorders: list[_RankRecorder], arguments: argparse.Namespace) -> None:
    """Write what arrives until there are enough messages or the time is over."""
    until = time.monotonic() + (arguments.seconds or math.inf)
    left = arguments.limit or math.inf
    poller = zmq.Poller()
    for recorder in recorders:
        poller.register(recorder.socket, zmq.POLLIN)
    by_socket = {recorder.socket: recorder for recorder in recorders}
    progress = Progress()
    try:
        while left > 0 and (wait := min(1.0, until - time.monotonic())) > 0:
            # One millisecond more: rounded down, the last wait would spin.
            for socket, _ in poller.poll(int(wait * 1000) + 1):
                left -= by_socket[socket].receive(int(min(left, _BURST)))
            messages, size = sum(r.live for r in recorders), sum(r.bytes for r in recorders)
            progress.show(f"{counted(messages, 'message')}, {size / 1e6:.1f} MB; Ctrl-C ends")
    finally:
        progress.clear()
