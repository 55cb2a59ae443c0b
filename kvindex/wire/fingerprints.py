"""Hashes of payloads, by which a repeated payload is recognised, in another process too."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from kvindex.wire.backend import BACKEND

if BACKEND == "native":
    from kvindex.wire._native import FINGERPRINT_SECRET_BYTES
    from kvindex.wire._native import Fingerprints as Core

_PURPOSE = b"kvindex payload"
_KNOWN_PAYLOAD = b"kvindex: two functions that differ give this different fingerprints"


class Fingerprints:
    """Fingerprints of 64 bits: NH under secret words (native), or keyed BLAKE2b.

    Args:
        seed: makes the words or the key, 0 … 2**128 - 1. If the seed is secret, two payloads have
            the same fingerprint with a probability of 2**-64, even if chosen by an attacker.

    Attributes:
        identity: names the function and its secret; fingerprints made under different identities
            cannot be compared.
        of: returns the fingerprint of a payload, -2**63 … 2**63 - 1.
        core: the native function; None if there is none.

    Thread safety: immutable.

    Examples:
        >>> Fingerprints(7).of(b"payload") == Fingerprints(7).of(b"payload")
        True
        >>> Fingerprints(7).identity == Fingerprints(8).identity
        False
    """

    __slots__ = ("core", "identity", "of")

    def __init__(self, seed: int = 0) -> None:
        self.core: Core | None
        self.of: Callable[[bytes], int]  # bound here: called for every message
        if BACKEND == "native":
            words = secret_words(seed, FINGERPRINT_SECRET_BYTES, _PURPOSE)
            self.core = Core(words)
            name, self.of = "nh64", self.core.of
        else:
            empty = blake2b(digest_size=8, key=seed.to_bytes(16, "little"), person=_PURPOSE)

            def of(payload: bytes) -> int:
                digest = empty.copy()  # the key is hashed once, not for every message
                digest.update(payload)
                return int.from_bytes(digest.digest(), "little", signed=True)

            self.core = None
            name, self.of = "blake2b", of
        # Of a known payload: functions that differ in anything, the secret included, differ here.
        self.identity = f"{name}:{self.of(_KNOWN_PAYLOAD) % 2**64:016x}"


def secret_words(seed: int, size: int, purpose: bytes) -> bytes:
    """Return the native core's secret words that a seed stands for: `size` bytes for a purpose."""
    key = seed.to_bytes(16, "little")
    parts = (blake2b(bytes([i]), key=key, person=purpose).digest() for i in range(-(-size // 64)))
    return b"".join(parts)[:size]
