"""vLLM's MessageQueue, of its own wheel, unmodified: pickle, its own way to wait.

`VLLM_USE_SPINLOOP_EXT=1` in the environment turns on the wheel's C extension that waits in a loop
of its own; it is off by default, as in vLLM.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from functools import partial
from typing import Any

from benchmarks.queues.adapter import Reader, Ring, Writer


class VLLMQueues:
    """vLLM's queues."""

    def __init__(self) -> None:
        module: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
        wanted = os.environ.get("VLLM_USE_SPINLOOP_EXT") == "1"
        if wanted != module.SPINLOOP_EXT_ENABLED:
            raise RuntimeError("vLLM's extension spinloop cannot be loaded")
        if wanted and sys.version_info < (3, 12):
            _outlive_spinloop()
        self._queue = module.MessageQueue

    def writer(self, ring: Ring) -> Writer:
        """Return the sending end of a new queue."""
        queue = self._queue(
            ring.readers,
            ring.readers,
            max_chunk_bytes=ring.chunk_bytes,
            max_chunks=ring.chunks,
        )
        return Writer(queue.export_handle(), queue.wait_until_ready, queue.enqueue, _collected)

    def reader(self, handle: Any, rank: int, ring: Ring) -> Reader:
        """Return the receiving end of this number."""
        queue = self._queue.create_from_handle(handle, rank)
        return Reader(queue.wait_until_ready, partial(queue.dequeue, indefinite=True), _collected)


def _collected() -> None:
    """Do nothing: vLLM's queue gives everything back when it is collected."""


def _outlive_spinloop() -> None:
    """Give `True` and `False` more references than spinloop can take.

    It takes one too many at the end of each wait. Before Python 3.12, where booleans became
    immortal, that ends the interpreter.
    """
    for value in (True, False):
        references = ctypes.c_ssize_t.from_address(id(value))
        references.value += 1 << 40
