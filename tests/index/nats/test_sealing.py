"""Sealed bodies open with the same key and at the same place, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvindex import ConfigurationError
from kvindex.index.nats.sealing import KEY_BYTES, Seal
from kvindex.wire.errors import DecodeError

pytestmark = pytest.mark.unit

DATA = b"tokens of a prompt" * 10


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_bytes(os.urandom(KEY_BYTES))
    return str(path)


def test_what_is_sealed_opens_again(key_file: str) -> None:
    sealed = Seal(key_file).seal(DATA, "a-1/7")
    assert b"tokens" not in sealed
    assert Seal(key_file).unseal(sealed, "a-1/7") == DATA
    assert Seal(key_file).unseal(Seal(key_file).seal(b"", "x"), "x") == b""


def test_the_same_data_is_never_sealed_in_the_same_way(key_file: str) -> None:
    seal = Seal(key_file)
    assert len({seal.seal(DATA, "a-1/7") for _ in range(100)}) == 100


def test_a_sealed_body_does_not_open_elsewhere(key_file: str) -> None:
    seal = Seal(key_file)
    sealed = seal.seal(DATA, "a-1/7")
    for place in ("a-1/8", "a-2/7", "", "00000000000000000007-a-1"):
        with pytest.raises(DecodeError, match="do not open with this key_file: use the relay's"):
            seal.unseal(sealed, place)


def test_any_changed_byte_is_noticed(key_file: str) -> None:
    seal = Seal(key_file)
    sealed = seal.seal(DATA, "a-1/7")
    for number in range(len(sealed)):
        changed = bytearray(sealed)
        changed[number] ^= 1
        with pytest.raises(DecodeError):
            seal.unseal(bytes(changed), "a-1/7")


def test_another_key_does_not_open(key_file: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(os.urandom(KEY_BYTES))
    sealed = Seal(key_file).seal(DATA, "a-1/7")
    with pytest.raises(DecodeError) as refused:
        Seal(str(other)).unseal(sealed, "a-1/7")
    assert refused.value.size == len(sealed)


def test_a_key_opens_nothing_that_was_not_sealed(key_file: str) -> None:
    with pytest.raises(DecodeError):
        Seal(key_file).unseal(DATA, "a-1/7")


def test_without_a_key_all_stays_as_it_is() -> None:
    seal = Seal(None)
    assert seal.is_open
    assert seal.seal(DATA, "a-1/7") is DATA
    assert seal.unseal(DATA, "anywhere") is DATA


@pytest.mark.parametrize("length", [0, 1, 11, 12, 13, 27, 28, 29, 10_000])
def test_too_few_bytes_are_the_same_error(key_file: str, length: int) -> None:
    with pytest.raises(DecodeError):
        Seal(key_file).unseal(bytes(length), "a-1/7")


@pytest.mark.parametrize("length", [0, 16, 31, 33, 44])
def test_a_key_of_another_length_is_refused_with_how_to_make_one(
    length: int, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    path.write_bytes(bytes(length))
    with pytest.raises(ConfigurationError, match=f"has {length} bytes instead of 32: make one"):
        Seal(str(path))


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"key_file: .*missing cannot be read: No such"):
        Seal(str(tmp_path / "missing"))


def test_without_cryptography_a_key_is_refused_with_what_to_install(key_file: str) -> None:
    program = f"""
import sys
sys.modules["cryptography.hazmat.primitives.ciphers.aead"] = None
from kvindex import ConfigurationError
from kvindex.index.nats.sealing import Seal
Seal(None).unseal(b"x", "y")
try:
    Seal({key_file!r})
except ConfigurationError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install -e '.[nats]'" in done.stdout, done.stderr
