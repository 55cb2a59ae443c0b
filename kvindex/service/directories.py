"""Private directories of servers' temporary files, of which none is left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

_DIRECTORY: Final = "kvindex-serve-"  # how their names begin
_NEW_SECONDS: Final = 60.0  # for which a directory without a lock counts as new


@contextmanager
def own_directory() -> Iterator[str]:
    """Make a private directory of temporary files, and remove it.

    Its lock shows that its owner lives. Directories of servers that were killed are removed first;
    new ones are left, since their lock may still be to come.
    """
    with os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_DIRECTORY):
                with suppress(OSError):  # it is locked, or another user's, or gone
                    _remove_left(entry)
    path = tempfile.mkdtemp(prefix=_DIRECTORY)
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(lock)
        shutil.rmtree(path, ignore_errors=True)


def _remove_left(entry: os.DirEntry[str]) -> None:
    if time.time() - entry.stat(follow_symlinks=False).st_mtime < _NEW_SECONDS:
        return
    lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(entry.path)
    finally:
        os.close(lock)
