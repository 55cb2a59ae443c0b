"""Hashes of payloads, by which a repeated payload is recognised, in another process too."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["KNOWN_PAYLOAD", "Fingerprints"]

KNOWN_PAYLOAD = b"kvindex: two functions that differ give this different fingerprints"


class Fingerprints:
    """Fingerprints of 64 bits: BLAKE2b under a key.

    Args:
        seed: makes the key, 0 … 2**128 - 1. A secret seed keeps anybody from aiming at a collision;
            without one, finding one takes 2**32 tries of somebody who chooses both payloads.

    Attributes:
        identity: names the function and its key; fingerprints made under different identities
            cannot be compared.

    Thread safety: immutable.

    Examples:
        >>> Fingerprints(7).of(b"payload") == Fingerprints(7).of(b"payload")
        True
        >>> Fingerprints(7).identity == Fingerprints(8).identity
        False
    """

    __slots__ = ("_empty", "identity")

    def __init__(self, seed: int = 0) -> None:
        key = seed.to_bytes(16, "little")
        self._empty = blake2b(digest_size=8, key=key, person=b"kvindex payload")
        self.identity = f"blake2b:{self.of(KNOWN_PAYLOAD) % 2**64:016x}"

    def of(self, payload: bytes) -> int:
        """Return the fingerprint of a payload, -2**63 … 2**63 - 1."""
        digest = self._empty.copy()
        digest.update(payload)
        return int.from_bytes(digest.digest(), "little", signed=True)
