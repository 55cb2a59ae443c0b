"""`kvindex serve` as users start it: a process of its own, asked over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvindex.testing import FakeEngine
from tests.live import PATIENCE

ROOT = Path(__file__).parents[3]
BLOCK = 4


class Answer(NamedTuple):
    """One response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Served:
    """A running `kvindex serve`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []  # on stderr
        self.errors = threading.Thread(target=self._read_errors, daemon=True)
        self.errors.start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in iter(self.process.stderr.readline, ""):
            self.said.append(line)

    @cached_property
    def port(self) -> int:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        line = self.process.stdout.readline() if ready else ""
        printed = re.search(r"at (https?)://[^ ]*:(\d+)$", line.strip())
        if printed is None:
            code = self.process.wait(PATIENCE)
            self.errors.join(PATIENCE)
            raise AssertionError(f"{line!r}, exit code {code}: {''.join(self.said)}")
        return int(printed[2])

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        via: http.client.HTTPConnection | None = None,
    ) -> Answer:
        """Return the response to one request, on a connection of its own unless one is given."""
        connection = via or self.connection()
        sent = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent.setdefault("content-type", "application/json")
        try:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return Answer(
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.read(),
            )
        finally:
            if via is None:
                connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.ask(
            "POST", path, body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


@contextmanager
def serving(*argv: object, env: Mapping[str, str] | None = None) -> Iterator[Served]:
    """Run `kvindex serve` at a port that the system chooses."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvindex", "serve", "--port", "0", *map(str, argv)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
    )
    served = Served(process)
    try:
        assert served.port
        yield served
    finally:
        process.kill()
        process.wait()
        served.errors.join(PATIENCE)
        assert not served.errors.is_alive(), "a process that it started has not ended"
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


@contextmanager
def engine(name: str = "1", **options: Any) -> Iterator[FakeEngine]:
    """Run a fake engine."""
    with FakeEngine(name, block_size=BLOCK, **options) as running:
        yield running


def register(served: Served, fake: FakeEngine, **fields: Any) -> Answer:
    """Register an engine's rank, as Dynamo's clients do."""
    headers = fields.pop("headers", {})
    body = {
        "instance_id": int(fake.worker),
        "endpoint": fake.endpoint,
        "replay_endpoint": fake.replay_endpoint,
        "model_name": "m",
        "block_size": BLOCK,
        **fields,
    }
    return served.ask("POST", "/register", body, headers)


def matched(served: Served, tokens: list[int], instance: str = "1", **headers: str) -> int:
    """Return how many tokens of a prompt an instance is said to hold."""
    answer = served.post("/query", {"token_ids": tokens, "model_name": "m"}, **headers)
    if answer.status != 200:
        return -answer.status
    instances = answer.json["instances"]
    return int(instances[instance]["longest_matched"]) if instance in instances else 0


def certificate_in(folder: Path) -> tuple[Path, Path]:
    """Return a new certificate for localhost, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([openssl, *made, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key
