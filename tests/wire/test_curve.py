"""CURVE keys: a value that refuses what cannot be a key pair."""

from __future__ import annotations

import pytest

from kvindex import ConfigurationError, Curve

pytestmark = pytest.mark.unit

SERVER, OTHER = Curve.generate(), Curve.generate()


@pytest.mark.parametrize(
    ("public_key", "secret_key", "server_key", "wrong"),
    [
        (b"short", SERVER.secret_key, None, "public_key"),
        (SERVER.public_key.decode(), SERVER.secret_key, None, "public_key"),
        (SERVER.public_key, b"short", None, "secret_key"),
        (SERVER.public_key, SERVER.secret_key, b"", "server_key"),
        (SERVER.public_key, OTHER.secret_key, None, "not a pair"),
        (SERVER.public_key, b"\xff" * 40, None, "secret_key cannot be used"),
    ],
    ids=["short public", "text", "short secret", "empty server", "no pair", "no Z85"],
)
def test_keys_that_cannot_work_are_refused(
    public_key: bytes, secret_key: bytes, server_key: bytes | None, wrong: str
) -> None:
    with pytest.raises(ConfigurationError, match=wrong):
        Curve(public_key=public_key, secret_key=secret_key, server_key=server_key)


def test_secret_keys_are_not_shown() -> None:
    client = Curve.generate(SERVER.public_key)
    for keys in (SERVER, client):
        assert keys.secret_key.decode() not in repr(keys)
