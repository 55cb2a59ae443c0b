"""Sleeping until a word in shared memory changes: Linux's futex, between processes.

As native/shm/futex.hpp, for the ring in Python. ctypes lets the GIL go meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import platform

from kvindex.errors import SegmentError

__all__ = ["Word"]

# futex(2)'s number by machine; asm-generic's for those that came late.
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYONE = (1 << 31) - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Word:
    """A word of 32 bits to sleep on: odd while someone may be asleep.

    Args:
        memory: where it lies.
        offset: at which byte; a multiple of four.

    Raises:
        SegmentError: the system call's number on this machine is not known.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        number = _FUTEX.get(platform.machine())
        if number is None:
            raise SegmentError(f"no futex is known for {platform.machine()}: build the native core")
        self._number = ctypes.c_long(number)
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._syscall = ctypes.CDLL(None).syscall

    def get_odd(self) -> int:
        """Announce a sleeper; with the lock held."""
        self._word.value |= 1
        return self._word.value

    def make_even(self) -> bool:
        """Note what sleepers wait for; with the lock held. True if `wake` must follow."""
        if self._word.value % 2 == 0:
            return False
        self._word.value += 1
        return True

    def wait(self, value: int, seconds: float) -> None:
        """Sleep while the word has this value; without the lock."""
        time = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        self._syscall(
            self._number, self._address, _FUTEX_WAIT, ctypes.c_uint32(value), ctypes.byref(time)
        )

    def wake(self) -> None:
        """Wake all who sleep; without the lock."""
        self._syscall(self._number, self._address, _FUTEX_WAKE, _EVERYONE)
