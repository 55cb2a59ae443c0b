"""Hashes of payloads in C++: `kvindex.index.Fingerprints` beside the native index."""

from __future__ import annotations

from kvindex.index.keys import secret_words
from kvindex.wire._native import FINGERPRINT_SECRET_BYTES
from kvindex.wire._native import Fingerprints as Core
from kvindex.wire.fingerprints import KNOWN_PAYLOAD

__all__ = ["Fingerprints"]


class Fingerprints:
    """Fingerprints of 64 bits: NH under secret words, as the index's keys are made.

    Args:
        seed: makes the words, 0 … 2**128 - 1. If the seed is secret, two payloads have the
            same fingerprint with a probability of 2**-64, even if chosen by an attacker.

    Attributes:
        identity: names the function and its words; fingerprints made under different identities
            cannot be compared.
        of: returns the fingerprint of a payload, -2**63 … 2**63 - 1.

    Thread safety: immutable.
    """

    __slots__ = ("identity", "of")

    def __init__(self, seed: int = 0) -> None:
        # Other words than those of the index's keys.
        words = secret_words(seed, FINGERPRINT_SECRET_BYTES, b"kvindex payload")
        self.of = Core(words).of  # bound here: called for every message
        self.identity = f"nh64:{self.of(KNOWN_PAYLOAD) % 2**64:016x}"
