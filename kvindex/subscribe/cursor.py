"""How far a rank's stream was applied, as a value that another process can go on from."""

from __future__ import annotations

import msgspec

from kvindex.errors import ConfigurationError, DecodeError
from kvindex.subscribe.actions import MAX_SEQ

__all__ = ["Cursor", "SavedCursor"]

_VERSION = 1


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sequencer stands: what the one that goes on from here must know.

    Attributes:
        epoch: restarts so far.
        seq: the last batch applied.
        ts: its timestamp, in seconds of the publisher's clock.
        next_seq: the seq that must follow; above `seq` + 1 where a loss was declared.
        complete: whether every batch from the publisher's first on was applied.
        oldest_ts: batches older than this belong to an earlier epoch.
        kept_losses: whether something was lost and what the rank held was kept nevertheless.
        recent: fingerprints of the last batches applied, by seq; that of `seq` is among them.

    Raises:
        ConfigurationError: values that no sequencer can have had.
    """

    epoch: int
    seq: int
    ts: float
    next_seq: int
    complete: bool
    oldest_ts: float
    kept_losses: bool
    recent: dict[int, int]

    def __post_init__(self) -> None:
        follows = 0 <= self.seq < self.next_seq <= MAX_SEQ + 1
        known = self.seq in self.recent and min(self.recent) >= 0 and max(self.recent) == self.seq
        whole = self.next_seq == self.seq + 1 and not self.kept_losses
        if self.epoch < 0 or not follows or not known or (self.complete and not whole):
            raise ConfigurationError(
                f"no stream stands at epoch {self.epoch}, seq {self.seq}, next {self.next_seq}, "
                f"{len(self.recent)} fingerprints, complete {self.complete}"
            )


class SavedCursor(msgspec.Struct, frozen=True, kw_only=True):
    """A cursor, and what its subscriber needs in order to give it to the right publisher.

    Attributes:
        cursor: how far the stream was applied.
        dp_rank: the publisher's by its port; the rank may have gone by another name.
        named: what its batches named, or None.
        fingerprints: which function made the fingerprints.
    """

    cursor: Cursor
    dp_rank: int
    named: int | None
    fingerprints: str

    def encode(self) -> bytes:
        """Return it as bytes: msgpack of the version of this format and the fields."""
        return _encoder.encode((_VERSION, self))

    @classmethod
    def decode(cls, data: bytes) -> SavedCursor:
        """Return what `encode` made bytes of.

        Raises:
            DecodeError: the bytes are no cursor, or one of another version.
        """
        try:
            version, fields = _envelopes.decode(data)
            if version == _VERSION:
                return _decoder.decode(fields)
        except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
            raise DecodeError(f"no cursor: {error}", size=len(data)) from error
        raise DecodeError(
            f"a cursor of version {version}; this release reads {_VERSION}", size=len(data)
        )


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_decoder = msgspec.msgpack.Decoder(SavedCursor)
