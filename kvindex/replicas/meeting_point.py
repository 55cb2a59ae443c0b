"""The socket file where joiners meet the server: private, one server at a time, none left over.

The file is in a directory that nobody else can write to, and is itself for its owner only; both
sides ask the kernel who the other one is. Connecting shows whether a file belongs to a killed
server or a living one: the kernel answers for a living server even if it is stopped or busy.

While a server checks and replaces the file, it holds a lock on a file beside it, so that two
servers that start at the same time do so one after the other. The lock file stays; it has no other
use.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvindex.wire.errors import ConfigurationError
from kvindex.wire.forks import close_in_children

try:
    import fcntl
except ImportError:  # not POSIX: `listen_at` says so
    fcntl = None  # type: ignore[assignment]

_BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_MAX_PATH_BYTES = 107
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Listener:
    """A listening socket, non-blocking, at a path whose directory exists.

    ConfigurationError: the path cannot be used: what is wrong, and what to do. OSError: the
    operating system refuses it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        _check_path(self.path)
        with _locked(self.path):
            _clear(self.path)
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                # A peer that connects before the mode is set is checked for its user, as all are.
                self.socket.bind(os.fspath(self.path))
                os.chmod(self.path, 0o600)
                self.socket.listen(_BACKLOG)
                self.socket.setblocking(False)
                close_in_children(self.socket)
                self._inode = _inode(self.path)
            except BaseException:
                self.socket.close()
                raise

    async def accept(self) -> socket.socket:
        """Return the next connection of this user, non-blocking."""
        while True:
            # Not the loop's own call: a connection would be lost in it if it is cancelled.
            try:
                connection, _ = self.socket.accept()
            except ConnectionAbortedError:
                continue
            except BlockingIOError:
                loop, ready = asyncio.get_running_loop(), asyncio.Event()
                loop.add_reader(self.socket, ready.set)
                try:
                    await ready.wait()
                finally:
                    loop.remove_reader(self.socket)
                continue
            if peer_uid(connection) == os.geteuid():
                connection.setblocking(False)
                close_in_children(connection)
                return connection
            connection.close()

    def close(self) -> None:
        """Stop listening, and remove the file if it is still this one. Idempotent."""
        self.socket.close()
        with suppress(OSError):
            if self._inode == _inode(self.path):
                self.path.unlink()


def connect_to(path: str | os.PathLike[str], timeout: float) -> socket.socket:
    """Return a connection to the server at a path, whose operations time out; raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(os.fspath(path))
        # Whoever may write to the directory could have put a socket of his there.
        owner = peer_uid(connection)
        if owner != os.geteuid():
            raise PermissionError(errno.EPERM, f"the server at {path} is user {owner}'s")
        close_in_children(connection)
        return connection
    except BaseException:
        connection.close()
        raise


def peer_uid(connection: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel reports it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def check_platform() -> None:
    """Raise ConfigurationError where the platform lacks such sockets."""
    if fcntl is None or not hasattr(socket, "SO_PEERCRED"):
        raise ConfigurationError("kvindex.replicas needs Linux; elsewhere connect in each process")


def _check_path(path: Path) -> None:
    check_platform()
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigurationError(
            f"{path} is too long for a socket: at most {_MAX_PATH_BYTES} bytes"
        )
    try:
        status = os.stat(path.parent)
    except OSError as error:
        raise ConfigurationError(f"no directory for the socket {path}: {error}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"{path.parent} is no directory")
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & _OTHERS_WRITE:
        raise ConfigurationError(
            f"others may write to {path.parent}, so they could put a socket of theirs there: use a "
            "directory of your own (mode 0700), as /run/user/UID is"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock beside a path."""
    # By `lockf`: a forked child does not have it, nor a killed process.
    descriptor = os.open(
        f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _clear(path: Path) -> None:
    """Remove the socket file that a dead server left."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(f"{path} exists and is no socket: choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        tried.setblocking(False)  # a living one whose backlog is full says EAGAIN
        if tried.connect_ex(os.fspath(path)) != errno.ECONNREFUSED:
            raise ConfigurationError(
                f"a living server listens at {path}: join it, close it, or choose another path"
            )
    path.unlink()


def _inode(path: Path) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino
