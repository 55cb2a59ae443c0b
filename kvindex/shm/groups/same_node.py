"""Which ranks share memory with one of them: by proof, not by the name of a host.

Containers on one machine may have a /dev/shm each, and two machines may have one name. So rank
`source` puts a secret into a file of /dev/shm that only its user can read, tells the others the
file's name, and believes those that tell it the secret.

The file is locked while it is used. Should its process be killed, the kernel drops the lock, and
the next that looks for who shares memory with it removes the file.
"""

from __future__ import annotations

import fcntl
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvindex.shm.groups.process_group import ProcessGroup

__all__ = ["SHARED_MEMORY", "ranks_that_share_memory"]

SHARED_MEMORY: Final = Path("/dev/shm")
"""Where shared memory is; what two processes both see there, they share."""

_SECRET_BYTES: Final = 32
_PROBE: Final = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PREFIX: Final = "kvindex-same-node-"
_NAME: Final = re.compile(re.escape(_PREFIX) + "[0-9a-f]{32}")

logger = logging.getLogger(__name__)


def ranks_that_share_memory(
    group: ProcessGroup, source: int, *, directory: Path = SHARED_MEMORY
) -> list[bool]:
    """Return at every rank, for each rank, whether it shares memory with rank `source`. Collective.

    A rank of another user does not, since segments are private to their user. If rank `source` has
    no shared memory, nobody shares it: all are False, its own entry too.

    Args:
        group: what connects the ranks; its broadcasts and gathers are used.
        source: the rank to share memory with.
        directory: where shared memory is.

    Raises: what `group` raises.
    """
    if group.rank != source:
        name = group.broadcast_object(None, source)
        group.gather_object(_read_secret(directory, name), source)
        return _verdict(group.broadcast_object(None, source), group.world_size)
    secret = secrets.token_bytes(_SECRET_BYTES)
    with _offered(directory, secret) as offered:
        group.broadcast_object(offered, source)
        answers = group.gather_object(_read_secret(directory, offered), source) or []
    return _verdict(
        group.broadcast_object([_is_secret(answer, secret) for answer in answers], source),
        group.world_size,
    )


@contextmanager
def _offered(directory: Path, secret: bytes) -> Iterator[str | None]:
    """Hold the secret in a file of that directory; its name, or None where none can be made."""
    _remove_abandoned(directory)
    try:
        file, path = _locked_file(directory)
    except OSError as error:
        logger.warning("no rank can share memory with this one: %s", error)
        yield None
        return
    try:
        try:
            os.write(file, secret)
        except OSError as error:
            logger.warning("no rank can share memory with this one: %s: %s", path, error)
        yield path.name
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def _locked_file(directory: Path) -> tuple[int, Path]:
    while True:
        path = directory / f"{_PREFIX}{secrets.token_hex(16)}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:  # else it was taken for abandoned before we had the lock
            return file, path
        os.close(file)


def _remove_abandoned(directory: Path) -> None:
    """Remove our user's files whose process was killed: nobody holds their locks."""
    for path in directory.glob(f"{_PREFIX}*"):
        try:
            file = os.open(path, _PROBE)
        except OSError:  # another user's, or gone meanwhile
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            continue  # in use
        finally:
            os.close(file)


def _read_secret(directory: Path, name: Any) -> bytes | None:
    """What is in the file of that name; None without one. No other file is ever looked at."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    try:
        file = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(file, _SECRET_BYTES) if stat.S_ISREG(os.fstat(file).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(file)


def _is_secret(answer: Any, secret: bytes) -> bool:
    return isinstance(answer, bytes) and hmac.compare_digest(answer, secret)


def _verdict(said: Any, world_size: int) -> list[bool]:
    """What rank `source` found, as far as it is of the right form."""
    verdict = [item is True for item in said] if isinstance(said, list) else []
    return [*verdict, *[False] * world_size][:world_size]
