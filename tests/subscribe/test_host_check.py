"""Names that cannot be resolved are found out in the background."""

from __future__ import annotations

import socket
import threading

import pytest

from kvindex.subscribe.connection import HostCheck
from tests.live import PATIENCE

pytestmark = pytest.mark.unit


class Names:
    """A resolver that knows the names it was given, and counts."""

    def __init__(self, *known: str) -> None:
        self.known = known
        self.asked: list[str] = []
        self.threads: list[threading.Thread] = []

    def __call__(self, host: str, port: None) -> None:
        self.asked.append(host)
        self.threads.append(threading.current_thread())
        if host not in self.known:
            raise socket.gaierror(-2, "Name or service not known")


def ask(check: HostCheck, now: float) -> None:
    check.ask(now)
    if check._asking is not None:
        check._asking.join(PATIENCE)


def test_an_unknown_name_is_told_and_asked_for_again_after_a_while() -> None:
    names = Names()
    check = HostCheck("tcp://vllm-0.pods:5557", names)
    assert check.trouble is None
    for now in (0.0, 5.0, 29.0):
        ask(check, now)
    assert names.asked == ["vllm-0.pods"]
    assert threading.current_thread() not in names.threads
    assert check.trouble is not None
    assert "'vllm-0.pods' is unknown" in check.trouble
    names.known = ("vllm-0.pods",)
    ask(check, 31.0)
    assert check.trouble == ""


@pytest.mark.parametrize(
    "endpoint", ["tcp://10.0.0.5:5557", "tcp://[::1]:5557", "ipc:///tmp/x", "inproc://x"]
)
def test_where_there_is_no_name_nothing_is_asked(endpoint: str) -> None:
    names = Names()
    check = HostCheck(endpoint, names)
    ask(check, 0.0)
    assert (names.asked, check.trouble) == ([], "")
