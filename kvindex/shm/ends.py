"""What a queue asks of its two kinds of end, wherever the other ends are.

The methods raise as those of `MessageQueue` do, and are for one thread at a time where none says
otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvindex.errors import ConfigurationError
from kvindex.shm.codec import Buffer, Codec

__all__ = ["ReadingEnd", "Receiver", "Sender", "WritingEnd", "WrongEnd"]


class Sender(Protocol):
    """What a writer's messages go to: a `RingSender`, if all readers are here."""

    def send(
        self, kind: int, body: Buffer | Sequence[Buffer], size: int, timeout: float | None
    ) -> None:
        """Send a message to every reader; its memory is free again when this returns."""


class WritingEnd(Protocol):
    """The end that every message starts from."""

    @property
    def sender(self) -> Sender:
        """What sends. The queue keeps it, so that an ordinary message takes no detour."""

    def chunk(self, length: int, timeout: float | None) -> AbstractContextManager[memoryview]:
        """Give memory for a raw message of at most a chunk; sent if the `with` ends well."""

    def wait_ready(self, timeout: float | None) -> None:
        """Return once every reader has come, having told all of them."""

    def evict(self, rank: int) -> bool:
        """Take a reader off; whether there was one. A local reader's rank: any thread."""

    def statistics(self) -> dict[str, Any]:
        """Return what was counted, under `local` and `remote`. Any thread."""

    def close(self) -> None:
        """Tell readers that this was all. Idempotent, any thread."""


class Receiver(Protocol):
    """What a reader's messages come from: a `RingReceiver`, if the writer is here."""

    def receive(
        self,
        codec: Codec,
        timeout: float | None,
        cancel: threading.Event | None = None,
        *,
        quiet: bool = False,
    ) -> Any:
        """Return the next message's object; `quiet` never warns of a long wait."""

    def message(
        self, timeout: float | None, cancel: threading.Event | None, *, quiet: bool
    ) -> AbstractContextManager[memoryview]:
        """Give the next message's bytes, read-only, until the `with` ends."""


class ReadingEnd(Protocol):
    """An end that every message comes to."""

    @property
    def receiver(self) -> Receiver:
        """What receives; as the `sender` of a `WritingEnd`."""

    def wait_ready(self, timeout: float | None) -> None:
        """Return once the writer says that every reader has come."""

    def statistics(self) -> dict[str, Any]:
        """Return the count of `messages`, and more under `local`. Any thread."""

    def close(self) -> None:
        """Tell the writer to wait for this reader no more. Idempotent, any thread."""


class WrongEnd:
    """What a queue has in place of the end that it is not: every use is refused.

    Args:
        why: what the error says.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise ConfigurationError(self._why)
