"""Named shared memory that leaves nothing behind, and shows which of its parties live.

A segment is a file in /dev/shm, private to the user (0600), under a name that cannot be guessed.
It gets its name only when it is whole: made nameless, given its memory (so that no later write can
find the file system full), its header and its maker's lock, and then linked.

A party shows that it lives by a lock on a byte of its own in the file (an open-file-description
lock, fcntl(2)): the kernel takes it back however the party ends, and neither a reused process id
nor another process namespace can feign it. The lock has a descriptor of its own, which a forked
child closes: a child does not keep its parent alive.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
import stat
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

from kvindex.wire.errors import ClosedError, SegmentError
from kvindex.wire.forks import disown_in_children

try:
    import fcntl

    _SET, _GET = fcntl.F_OFD_SETLK, fcntl.F_OFD_GETLK
except (ImportError, AttributeError):  # not Linux: `check_platform` says so
    _SET, _GET = -1, -1

logger = logging.getLogger(__name__)

_FOLDER = "/dev/shm"
# Not blocking: on a file that somebody has leased, open(2) would sleep until the lease is broken.
_OPENED = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_PARTIES_AT = 1 << 40  # beyond every byte of memory
_PARTIES = 1 << 20
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, len, pid

MAKER = 0
"""The maker's party number; parties are numbered from 0."""


def check_platform() -> None:
    """Raise SegmentError where the platform lacks shared memory with such locks."""
    if _SET == -1 or not os.path.isdir(_FOLDER):
        raise SegmentError(f"shared memory needs Linux: {_FOLDER} and open-file-description locks")


class Segment:
    """A mapping of named shared memory.

    Attributes:
        name: its file's name in /dev/shm.
        memory: the mapping, writable.
        on_fork: called in a forked child, where the mapping is the parent's.
        inherited: whether this is such a child's.

    Thread safety: every method may be called from any thread.
    """

    def __init__(self, name: str, descriptor: int, size: int, *, maker: bool) -> None:
        self.name = name
        self.on_fork: Callable[[], None] | None = None
        self.inherited = False
        try:
            self.memory, self._locks = _map(descriptor, size)
        except (OSError, ValueError, OverflowError) as error:
            raise SegmentError(
                getattr(error, "errno", None) or errno.EINVAL,
                f"shared memory {name} of {size} bytes cannot be mapped: {error}",
            ) from error
        finally:
            os.close(descriptor)
        self._finalizer = weakref.finalize(
            self, _end, self.memory, self._locks, name if maker else None, os.getpid()
        )
        disown_in_children(self, Segment._disown)

    @classmethod
    def make(cls, size: int, header: bytes) -> Segment:
        """Return new memory of `size` bytes that starts with `header`; its maker's lock is held.

        Raises:
            SegmentError: there is no room for it, or no such memory on this platform.
        """
        check_platform()
        sweep()
        name = f"{_prefix()}{secrets.token_hex(16)}"
        descriptor = -1
        segment = None
        try:
            descriptor = os.open(_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.fchmod(descriptor, 0o600)
            # All memory now: on a full file system a later write would end the process (SIGBUS).
            os.posix_fallocate(descriptor, 0, size)
            os.pwrite(descriptor, header, 0)
            segment = cls(name, os.dup(descriptor), size, maker=True)
            # Before it has a name: a sweep by another process removes what nobody holds.
            if not segment.hold(MAKER):
                raise SegmentError(f"the maker's lock of {name} is held already")
            _link(descriptor, name)
            return segment
        except BaseException as error:
            if segment is not None:
                segment.close()
            if isinstance(error, SegmentError) or not isinstance(error, OSError | OverflowError):
                raise
            number = getattr(error, "errno", errno.EFBIG)
            raise SegmentError(number, _no_room(size, error)) from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    @classmethod
    def attach(cls, name: str) -> Segment:
        """Return a mapping of memory that another party made.

        Raises:
            SegmentError: there is none of that name, or it is not this user's alone.
        """
        check_platform()
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise SegmentError(f"{name!r} cannot name shared memory")
        try:
            descriptor = os.open(f"{_FOLDER}/{name}", _OPENED)
        except (OSError, UnicodeEncodeError) as error:
            raise SegmentError(
                getattr(error, "errno", errno.EINVAL),
                f"shared memory {name!r} cannot be attached: is its maker closed? {error}",
            ) from error
        # Of the descriptor, not of the name: that may be another file by now.
        status = os.fstat(descriptor)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or stat.S_IMODE(status.st_mode) & 0o077
            or status.st_size == 0
        ):
            os.close(descriptor)
            raise SegmentError(f"shared memory {name} is not private to this user: refused")
        return cls(name, descriptor, status.st_size, maker=False)

    def hold(self, party: int) -> bool:
        """Acquire a party's lock, for as long as this mapping is open; False if another has it."""
        self._check_open()
        return self._locks.take(party)

    def lives(self, party: int) -> bool:
        """Return whether a party's lock is held by another mapping than this. A system call."""
        self._check_open()
        return self._locks.held_elsewhere(party)

    def unlink(self) -> None:
        """Remove the name; processes that have mapped the memory keep it."""
        with suppress(FileNotFoundError):
            os.unlink(f"{_FOLDER}/{self.name}")

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this is a forked child's copy."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Unmap it, release the locks, and unlink it if it was made here. Idempotent."""
        self._finalizer()

    def _check_open(self) -> None:
        if self.inherited:
            raise ClosedError(
                f"shared memory {self.name} was opened by the parent process; attach by its name"
            )
        if self.closed:
            raise ClosedError(f"shared memory {self.name} is closed in this process")

    def _disown(self) -> None:
        """In a forked child: mapping and locks belong to the parent."""
        # No lock is waited for: a thread that the child does not have may hold it for ever. The
        # locks' descriptor is closed, or the child would keep its parent alive for the others.
        if self._finalizer.detach() is not None:
            self.inherited = True
            self._locks.disown()
        if self.on_fork is not None:
            self.on_fork()


def sweep() -> int:
    """Remove this user's segments none of whose parties lives; return how many.

    Such segments remain if all parties were killed. Each new segment is preceded by a sweep.
    """
    swept = 0
    try:
        names = os.listdir(_FOLDER)
    except OSError as error:  # no descriptor is free: the next sweep comes by
        logger.warning("%s cannot be searched for what killed processes left: %s", _FOLDER, error)
        return 0
    for name in names:
        if not name.startswith(_prefix()):
            continue
        path = f"{_FOLDER}/{name}"
        try:
            if os.lstat(path).st_uid != os.geteuid():
                continue  # another user's file may have such a name
            descriptor = os.open(path, _OPENED)
        except OSError:
            continue  # gone meanwhile
        try:
            if _lock_command(descriptor, _GET, fcntl.F_WRLCK, 0, _PARTIES) == fcntl.F_UNLCK:
                os.unlink(path)
                swept += 1
        except OSError:
            continue
        finally:
            os.close(descriptor)
    if swept:
        logger.info("removed %d shared-memory segments that killed processes left", swept)
    return swept


def _prefix() -> str:
    return f"kvindex-{os.geteuid()}-"


class _Locks:
    """The parties' locks, by a descriptor that no thread closes while another one uses it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        # Reentrant: a signal handler may close the descriptor that its thread uses.
        self._using = threading.RLock()

    def take(self, party: int) -> bool:
        try:
            self._ask(_SET, fcntl.F_WRLCK, party)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def held_elsewhere(self, party: int) -> bool:
        return self._ask(_GET, fcntl.F_WRLCK, party) != fcntl.F_UNLCK

    def _ask(self, command: int, kind: int, party: int) -> int:
        with self._using:
            if self._descriptor is None:
                raise ClosedError("this end of the queue is closed")
            return _lock_command(self._descriptor, command, kind, party)

    def close(self) -> None:
        """Close the descriptor, which releases every lock of this mapping."""
        with self._using:
            self.disown()

    def disown(self) -> None:
        """Close the descriptor as a forked child does, whatever its parent's threads held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _lock_command(descriptor: int, command: int, kind: int, party: int, count: int = 1) -> int:
    """Ask the kernel about parties' locks; return the kind of lock that it answers with."""
    request = _FLOCK.pack(kind, os.SEEK_SET, _PARTIES_AT + party, count, 0)
    return int(_FLOCK.unpack(fcntl.fcntl(descriptor, command, request))[0])


def _map(descriptor: int, size: int) -> tuple[mmap.mmap, _Locks]:
    memory = mmap.mmap(descriptor, size)
    try:
        return memory, _Locks(_open_again(descriptor))
    except BaseException:
        memory.close()
        raise


def _open_again(descriptor: int) -> int:
    """Open a descriptor's file anew."""
    # mmap keeps a duplicate of its descriptor, and with it the locks that were taken through it:
    # they would outlive `close` for as long as a view of the memory does.
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def _link(descriptor: int, name: str) -> None:
    """Give a nameless file its name."""
    # With a folder's descriptor link(2) follows the path, which is a symbolic link.
    folder = os.open(_FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{descriptor}", f"{_FOLDER}/{name}", src_dir_fd=folder)
    finally:
        os.close(folder)


def _no_room(size: int, error: OSError | OverflowError) -> str:
    if getattr(error, "errno", None) not in (errno.ENOSPC, errno.ENOMEM):
        return f"shared memory of {size} bytes cannot be made: {error}"
    free = os.statvfs(_FOLDER)
    return (
        f"shared memory of {size} bytes does not fit: {free.f_bavail * free.f_frsize} bytes are "
        f"free in {_FOLDER}; use smaller or fewer chunks, or give the container a larger --shm-size"
    )


def _end(memory: mmap.mmap, locks: _Locks, made: str | None, pid: int) -> None:
    """Close what a segment opened."""
    if os.getpid() != pid:  # at a forked child's exit: it is the parent's
        return
    if made is not None:  # first, so that no process finds a segment half gone
        with suppress(OSError):
            os.unlink(f"{_FOLDER}/{made}")
    locks.close()
    with suppress(BufferError):  # a view is still in use: unmapped when that is dropped
        memory.close()
