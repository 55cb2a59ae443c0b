"""Without the native module everything imports, and what needs a ring says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.children import ENVIRONMENT, run_code

pytestmark = pytest.mark.unit

WITHOUT = """
import sys
sys.modules["kvindex.wire._native"] = None  # as on a machine without a compiler
import kvindex, kvindex.replicas, kvindex.shm
from kvindex.wire.errors import KVIndexError
from kvindex.shm import Handle, MessageQueue, ShmRingBuffer
handle = Handle(
    n_reader=1, local_reader_ranks=[0], buffer_handle=(1, 64, 4, "kvindex-ring"),
    remote_address=None, remote_curve_key=None, codec="msgpack",
    max_message_bytes=64,
)
try:
    {use}
except KVIndexError as error:
    print(error)
"""
USES = {
    "a ring": "ShmRingBuffer(1, 64, 4)",
    "a writer with readers here": "MessageQueue(2, 1)",
    "a reader here": "MessageQueue.create_from_handle(handle, 0)",
    "a server of a fan-out": "kvindex.replicas.FanOut([], sys.argv[1])",
    "a replica": "kvindex.replicas.join(sys.argv[1])",
}


def run_without(use: str, path: Path) -> str:
    env = {**ENVIRONMENT, "KVINDEX_BACKEND": "python"}
    _, out, errors = run_code(WITHOUT.replace("{use}", use), str(path), env=env)
    assert errors == ""
    return out


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_an_error_says_that_the_native_module_is_missing(use: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    error = run_without(use, tmp_path / "socket")
    assert "native module" in error
    assert "pip install" in error
    assert list(tmp_path.glob("socket")) == []


def test_a_queue_whose_readers_are_all_elsewhere_needs_no_native_module(tmp_path: Path) -> None:
    use = 'MessageQueue(1, 0, connect_ip="127.0.0.1").close(); print("made")'
    assert run_without(use, tmp_path) == "made\n"
