"""Named shared memory: who may have it, and that nothing of it stays behind."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import re
import resource
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvindex.shm import ShmRingBuffer
from kvindex.shm.ring.segment import MAKER, Segment, check_platform, sweep
from kvindex.wire.errors import ClosedError, SegmentError
from tests.children import run_code
from tests.native_ring import needs_ring

pytestmark = [pytest.mark.unit, needs_ring]

FOLDER = Path("/dev/shm")


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.make(8192, b"header")
    yield segment
    segment.close()


@pytest.fixture
def file() -> Iterator[Callable[..., str]]:
    """Make a file of these bytes in /dev/shm, which no sweep takes for ours."""
    made: list[Path] = []

    def make(content: bytes, mode: int = 0o600) -> str:
        path = FOLDER / f"test-{os.getpid()}-{os.urandom(8).hex()}"
        path.write_bytes(content)
        path.chmod(mode)
        made.append(path)
        return path.name

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def test_memory_starts_with_its_header_and_zeros(segment: Segment) -> None:
    assert len(segment.memory) == 8192
    assert segment.memory[:] == b"header" + bytes(8186)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_segment_is_private_to_its_user_and_its_memory_is_there_at_once(
    open_umask: None, segment: Segment
) -> None:
    status = (FOLDER / segment.name).stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()
    assert status.st_nlink == 1
    assert status.st_blocks * 512 >= 8192


def test_names_cannot_be_guessed() -> None:
    segments = [Segment.make(4096, b"") for _ in range(20)]
    names = {segment.name for segment in segments}
    for segment in segments:
        segment.close()
    assert len(names) == 20
    for name in names:
        assert re.fullmatch(rf"kvindex-{os.geteuid()}-[0-9a-f]{{32}}", name)


@pytest.mark.parametrize("extra", [1, 1 << 20])
def test_memory_that_does_not_fit_is_refused_with_the_numbers(extra: int) -> None:
    free = os.statvfs(FOLDER)
    size = free.f_blocks * free.f_frsize + extra
    with pytest.raises(SegmentError, match=f"{size} bytes does not fit: [0-9]+ bytes are free"):
        Segment.make(size, b"")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "../shm/x", "a/b", "a\0b", "\ud800", "kvindex-none"]
)
def test_names_of_nothing_are_refused(name: str) -> None:
    with pytest.raises(SegmentError):
        Segment.attach(name)


@pytest.mark.parametrize("mode", [0o660, 0o606, 0o644, 0o640, 0o601])
def test_memory_that_others_may_touch_is_refused(file: Callable[..., str], mode: int) -> None:
    with pytest.raises(SegmentError, match="not private"):
        Segment.attach(file(bytes(4096), mode))


def test_memory_of_another_user_is_refused(
    file: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = file(bytes(4096))
    user = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: user + 1)
    with pytest.raises(SegmentError, match="not private"):
        Segment.attach(name)


def test_links_folders_and_empty_files_are_refused(file: Callable[..., str]) -> None:
    target, link = file(bytes(4096)), file(b"")
    with pytest.raises(SegmentError, match="not private"):
        Segment.attach(link)
    (FOLDER / link).unlink()
    (FOLDER / link).symlink_to(FOLDER / target)
    with pytest.raises(SegmentError):
        Segment.attach(link)
    (FOLDER / link).unlink()
    (FOLDER / link).mkdir(0o700)
    try:
        with pytest.raises(SegmentError):
            Segment.attach(link)
    finally:
        (FOLDER / link).rmdir()


def descriptors_of(inode: int) -> int:
    """How many of this process's descriptors are of that file in /dev/shm."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # that of the listing itself
        count += (status.st_ino, status.st_dev) == (inode, FOLDER.stat().st_dev)
    return count


def test_refusing_leaves_no_descriptor_open(file: Callable[..., str]) -> None:
    names = file(bytes(4096), 0o644), file(b"x" * 100)
    for name in names:
        with pytest.raises(SegmentError):
            ShmRingBuffer(1, 64, 1, name)
        assert descriptors_of((FOLDER / name).stat().st_ino) == 0


def descriptors() -> set[tuple[str, str]]:
    """What is open, by number. What earlier tests left may be closed at any time, so no count."""
    open_files = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            open_files.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return open_files


def fill_descriptors() -> list[int]:
    """Open descriptors until none is free below the last: a limit is of numbers, not of files."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    kept = [os.open("/dev/null", os.O_RDONLY)]
    while kept[-1] < highest:
        kept.append(os.open("/dev/null", os.O_RDONLY))
    return kept


@pytest.mark.parametrize("size", [0, -1, 1 << 62, 1 << 70])
def test_absurd_sizes_are_refused_and_leave_nothing_open(size: int) -> None:
    before = descriptors()
    with pytest.raises(SegmentError, match=r"cannot be made|does not fit"):
        Segment.make(size, b"")
    assert descriptors() <= before


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "no memory"), ValueError("too long")])
@pytest.mark.parametrize("what", ["mmap.mmap", "_open_again"])
def test_failing_to_map_leaves_nothing_open(
    segment: Segment, error: Exception, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(f"kvindex.shm.ring.segment.{what}", fail)
        with pytest.raises(SegmentError, match="cannot be mapped"):
            Segment.attach(segment.name)
        with pytest.raises(SegmentError, match="cannot be mapped"):
            Segment.make(4096, b"")
    assert descriptors() <= before


def test_with_few_descriptors_left_it_is_made_or_refused_and_nothing_leaks(
    segment: Segment,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    outcomes = []
    calls: list[Callable[[], Segment]] = [
        lambda: Segment.make(4096, b""),
        lambda: Segment.attach(segment.name),
    ]
    gc.collect()  # what earlier tests left would make room under the limit
    opened = descriptors()
    try:
        for free in range(8):
            kept = fill_descriptors()
            top = kept[-1] + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (top + free, before[1]))
            try:
                for call in calls:
                    try:
                        call().close()
                        outcomes.append("made")
                    except SegmentError:
                        outcomes.append("refused")
                sweep()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
                for descriptor in kept:
                    os.close(descriptor)
            assert descriptors() <= opened
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert outcomes[:2] == ["refused", "refused"]
    assert outcomes[-2:] == ["made", "made"]


def test_closing_gives_back_descriptors_and_the_name() -> None:
    segment = Segment.make(4096, b"")
    inode = (FOLDER / segment.name).stat().st_ino
    held = descriptors_of(inode)
    assert held > 0
    attached = Segment.attach(segment.name)
    attached.close()
    assert (FOLDER / segment.name).exists()
    assert descriptors_of(inode) == held
    segment.close()
    segment.close()
    assert not (FOLDER / segment.name).exists()
    assert descriptors_of(inode) == 0
    assert segment.closed
    with pytest.raises(ClosedError):
        segment.lives(MAKER)
    with pytest.raises(ClosedError):
        segment.hold(1)


def test_a_view_that_is_still_in_use_outlives_closing() -> None:
    segment = Segment.make(4096, b"header")
    with memoryview(segment.memory) as view:
        segment.close()
        assert bytes(view[:6]) == b"header"
    assert not (FOLDER / segment.name).exists()


def test_a_segment_that_is_dropped_is_closed() -> None:
    segment = Segment.make(4096, b"")
    path = FOLDER / segment.name
    del segment
    assert not path.exists()


# Who lives -----------------------------------------------------------------------------------


def test_a_party_lives_as_long_as_its_mapping(segment: Segment) -> None:
    assert not segment.lives(MAKER)  # it never asks for itself
    other = Segment.attach(segment.name)
    assert other.lives(MAKER)
    assert not segment.lives(3)
    assert other.hold(3)
    assert segment.lives(3)
    assert not segment.hold(3)
    assert not segment.lives(4)
    other.close()
    assert not segment.lives(3)
    assert segment.hold(3)


@pytest.fixture
def left() -> Iterator[Callable[[int], Path]]:
    """Make a file as a killed process of this user leaves it, or one of another user's name."""
    made: list[Path] = []

    def make(user: int) -> Path:
        made.append(FOLDER / f"kvindex-{user}-{os.urandom(16).hex()}")
        made[-1].write_bytes(bytes(4096))
        return made[-1]

    yield make
    for path in made:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "sweeping", [sweep, lambda: Segment.make(4096, b"").close()], ids=["sweep", "make"]
)
def test_sweeping_removes_what_nobody_holds_and_nothing_else(
    segment: Segment, left: Callable[[int], Path], sweeping: Callable[[], object]
) -> None:
    dead, foreign = left(os.geteuid()), left(os.geteuid() + 1)
    sweeping()  # another process's may have been quicker
    assert not dead.exists()
    assert foreign.exists()
    assert (FOLDER / segment.name).exists()


def test_a_sweep_waits_for_nobody_who_has_leased_a_file(left: Callable[[int], Path]) -> None:
    leased = left(os.geteuid())
    held = os.open(leased, os.O_RDONLY)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # asks the holder to end the lease
    try:
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        sweeping = threading.Thread(target=sweep, daemon=True)
        sweeping.start()
        sweeping.join(20.0)  # the kernel breaks a lease after 45 s
        assert not sweeping.is_alive()
        with pytest.raises(SegmentError, match="cannot be attached"):
            Segment.attach(leased.name)
    finally:
        os.close(held)
        signal.signal(signal.SIGIO, before)


def test_a_sweep_does_not_open_what_another_user_gave_such_a_name(
    left: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = os.geteuid() + 1
    foreign = left(victim)
    opened: list[Any] = []

    def spy(path: Any, *arguments: Any, **options: Any) -> int:
        opened.append(path)
        return open_file(path, *arguments, **options)

    open_file = os.open
    monkeypatch.setattr(os, "geteuid", lambda: victim)
    monkeypatch.setattr(os, "open", spy)
    sweep()
    assert foreign.exists()
    assert str(foreign) not in map(str, opened)


def test_a_platform_without_such_locks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvindex.shm.ring.segment._SET", -1)
    with pytest.raises(SegmentError, match="needs Linux"):
        check_platform()


# Ends of processes ---------------------------------------------------------------------------

MADE = """
import sys
from kvindex.shm import MessageQueue, ShmRingBuffer
ring = ShmRingBuffer(1, 64, 4)
queue = MessageQueue(1, 1, None, 64, 4)
reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
queue.enqueue("unread")
print(ring.name, queue.export_handle().buffer_handle[3], flush=True)
"""
ENDS = {
    "normally": "",
    "by sys.exit": "sys.exit(3)",
    "by an exception": "raise ZeroDivisionError",
    "in a function that returns": "def f():\n global ring\n r = ring\nf(); del ring, queue, reader",
    "while a thread waits": """
import threading
threading.Thread(target=lambda: (reader.dequeue(), reader.dequeue()), daemon=True).start()
""",
}


@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left_when_a_process_ends(how: str) -> None:
    _, out, errors = run_code(MADE + ENDS[how])
    names = out.split()
    assert len(names) == 2
    assert not any((FOLDER / name).exists() for name in names)
    if how == "by an exception":
        assert errors.rstrip().endswith("ZeroDivisionError")
    elif how == "while a thread waits":  # which is told, or frozen by the interpreter's end
        assert "resource_tracker" not in errors
    else:
        assert errors == ""  # nor does multiprocessing's resource tracker complain
