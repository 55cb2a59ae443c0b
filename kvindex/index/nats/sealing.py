"""Bodies and snapshots sealed with a pool's key: neither NATS nor its operators read them."""

from __future__ import annotations

import os
from pathlib import Path

from kvindex.wire.errors import ConfigurationError, DecodeError, how_to_install

KEY_BYTES = 32
SEAL_BYTES = 28  # that sealing adds: a nonce and a tag
_NONCE_BYTES = 12  # random: a pool writes about 2**32 bodies in a year, as many as are safe


class Seal:
    """Seals with AES-256-GCM; without a key file it leaves all as it is.

    Args:
        key_file: a file of 32 random bytes, or None.

    Raises:
        ConfigurationError: the file cannot be read or has another length, or `cryptography`, of the
            extra `kvindex[nats]`, is missing.

    Thread safety: every method may be called from any thread.
    """

    def __init__(self, key_file: str | None) -> None:
        self.is_open = key_file is None
        if key_file is None:
            return
        try:
            key = Path(key_file).read_bytes()
        except OSError as error:
            raise ConfigurationError(
                f"key_file: {key_file} cannot be read: {error.strerror}"
            ) from None
        if len(key) != KEY_BYTES:
            raise ConfigurationError(
                f"key_file: {key_file} has {len(key)} bytes instead of {KEY_BYTES}: make one with "
                f"`head -c {KEY_BYTES} /dev/urandom`"
            )
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigurationError(
                f"key_file needs the package cryptography: {how_to_install('nats')}"
            ) from None
        self._cipher = AESGCM(key)

    def seal(self, data: bytes, place: str) -> bytes:
        """Return data sealed for a place: an epoch and a number; it opens nowhere else."""
        if self.is_open:
            return data
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, place.encode())

    def unseal(self, data: bytes, place: str) -> bytes:
        """Return what was sealed for this place; raises DecodeError."""
        if self.is_open:
            return data
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], place.encode())
        except (InvalidTag, ValueError):
            raise DecodeError(
                f"{len(data)} bytes at {place} do not open with this key_file: use the relay's",
                size=len(data),
            ) from None
