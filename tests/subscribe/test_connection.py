"""One socket and its monitor: how much it takes and holds, and hosts that cannot be resolved."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from contextlib import suppress

import pytest
import zmq

from kvindex import SocketOptions
from kvindex.subscribe.connection import Connection, HostCheck
from tests.live import PATIENCE
from tests.publish.publish_peers import Context
from tests.subscribe.peers import RawPublisher

pytestmark = pytest.mark.faults


def test_more_messages_than_may_wait_wait_at_their_publisher(context: Context) -> None:
    """Each has 256 KiB: some megabytes of them fit into the system's buffers."""
    publisher, payload = RawPublisher(context, hwm=1), bytes(256 * 1024)
    publisher.socket.setsockopt(zmq.XPUB_NODROP, 1)
    publisher.socket.setsockopt(zmq.SNDTIMEO, 500)
    options = SocketOptions(hwm=8)
    reading = Connection(context, zmq.SUB, publisher.endpoint, options, subscriptions=(b"",))
    publisher.wait_subscribed()
    sent = 0
    with suppress(zmq.Again):
        while sent < 600:
            publisher.send_batches(range(sent, sent + 1), payload)
            sent += 1
    assert sent < 600, "all of it fits into ZeroMQ"
    received: list[list[bytes]] = []
    while len(received) < sent:
        reading.socket.poll(int(PATIENCE * 1000))
        received += reading.receive()
    assert [int.from_bytes(seq, "big") for _, seq, _ in received] == list(range(sent))
    reading.close()


def test_strangers_that_connect_and_hang_up_while_we_are_held_do_not_freeze_the_process() -> None:
    spawn = multiprocessing.get_context("spawn")
    child = spawn.Process(target=_close_a_bound_socket_after_a_port_scan)
    child.start()
    child.join(PATIENCE)
    try:
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join(PATIENCE)


def _close_a_bound_socket_after_a_port_scan() -> None:
    """Close a listening socket whose monitor nobody has read since strangers came and went."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with zmq.Context[zmq.Socket[bytes]]() as context:
        listening = Connection(
            context, zmq.SUB, f"tcp://127.0.0.1:{port}", SocketOptions(), bind=True
        )
        for _ in range(1_500):
            try:
                with socket.create_connection(("127.0.0.1", port), 5) as stranger:
                    stranger.recv(1)
            except OSError:
                break  # ZeroMQ's thread has stopped: closing will show it
        listening.close()


def test_one_look_takes_at_most_two_of_the_largest_messages_and_says_that_more_is_left(
    context: Context,
) -> None:
    publisher, link = RawPublisher(context, "inproc://large"), SocketOptions()
    listening = Connection(context, zmq.SUB, "inproc://large", link, subscriptions=(b"",))
    publisher.wait_subscribed()
    sizes = [1024 * 1024] * 40
    publisher.send(*([bytes(size)] for size in sizes))
    looks = []
    while not listening.drained:
        looks.append([len(message[0]) for message in listening.receive()])
    assert max(map(sum, looks)) <= 2 * link.max_message_bytes
    assert [size for look in looks for size in look] == sizes
    listening.close()


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
