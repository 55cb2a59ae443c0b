"""A gateway of several processes: one routes, the others are proxies at one listening socket.

Each runs the parent's own command line, with what part it has.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from kvindex.gateway.children import Child, Children, from_parent
from kvindex.gateway.door import Door
from kvindex.gateway.remote import RemoteRouting
from kvindex.gateway.router_process import RouterProcess
from kvindex.gateway.routers import Routers
from kvindex.gateway.settings import GatewaySettings

try:
    from uvloop import run as run_loop
except ImportError:
    from asyncio import run as run_loop  # type: ignore[assignment]


def workers(command: Sequence[str], listener: socket.socket, proxies: int) -> Children:
    """Return the processes of a gateway.

    Args:
        command: the command line of a gateway; `run_part` reads what is appended to it.
        listener: the listening socket of the proxies.
        proxies: how many there are.
    """
    opened = ExitStack()
    folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="kvindex-"))
    path, fd = os.path.join(folder, "router"), listener.fileno()
    router = Child("router", [*command, *part_options("router", path)])
    proxy = [*command, *part_options("proxy", path, fd)]
    started = [Child(f"proxy-{number}", proxy, (fd,)) for number in range(proxies)]
    return Children([router], started, opened)


def part_options(part: str, path: str, descriptor: int = -1) -> list[str]:
    """Return the option that gives a process its part; `run_part` reads it."""
    return ["--part", f"{part}:{descriptor}:{path}"]


def run_part(
    part: str,
    make_routers: Callable[[], Routers],
    settings: GatewaySettings,
    engine_token: Callable[[], str | None],
) -> None:
    """Run one of the processes of `workers`, or the picker beside Envoy.

    It ends on SIGTERM, or with the parent.

    Args:
        part: as appended to the command line.
        make_routers: makes those of the router process.
        settings: of the gateway.
        engine_token: returns the engines' API key.
    """
    name, descriptor, path = part.split(":", 2)
    if name == "router":
        with make_routers() as routers:
            run_loop(_route(routers, path))
        return
    if name == "picker":
        from kvindex.gateway.envoy.running import run_picker  # needs kvindex[envoy]

        with make_routers() as routers:
            run_picker(path, int(descriptor), routers, settings, engine_token)
        return
    routing = RemoteRouting(path)
    door = Door(routing, routing, settings, engine_token)
    signal.signal(signal.SIGTERM, lambda *_: door.stop())
    from_parent(door.stop)
    listener = socket.socket(fileno=int(descriptor))
    door.run(listener, lambda accepts: routing.run(door.statistics, accepts))


async def _route(routers: Routers, path: str) -> None:
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    from_parent(lambda: loop.call_soon_threadsafe(ending.set))
    with suppress(FileNotFoundError):
        os.unlink(path)  # of a router process before
    await RouterProcess(routers, path).serve(ending)
