"""Ports that stay ours while nobody listens at them, and the fake engine's publisher at such."""

from __future__ import annotations

import socket
from typing import Any

import zmq

from kvindex.publish import ZmqEventPublisher
from kvindex.wire import Dialect
from kvindex.wire.errors import ConfigurationError


def reserve_port(host: str = "127.0.0.1", port: int = 0) -> tuple[socket.socket, int]:
    """Return a free TCP port, or this one, and the socket that keeps it from others.

    The socket is bound and never listens: a server that sets SO_REUSEADDR, as libzmq does, can
    bind and listen beside it, close, and return to the same port.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Both sides must set it for the other to bind beside this one.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
        return holder, int(holder.getsockname()[1])
    except OSError:
        holder.close()
        raise


class Outlet:
    """The publisher of one engine process after another, at endpoints that stay."""

    def __init__(
        self,
        dialect: Dialect,
        dp_rank: int,
        endpoints: tuple[str, str | None],
        knobs: dict[str, Any],
    ) -> None:
        self.publisher: ZmqEventPublisher | None = None
        self._dialect = dialect
        self._dp_rank = dp_rank
        self._endpoints = endpoints
        self._knobs = knobs
        self._kept: tuple[str, str | None] | None = None
        self._holders: list[socket.socket] = []
        self._context: zmq.Context[Any] | None = None

    def start(self) -> None:
        """Start a publisher, at the ports of the one before if they were not forgotten."""
        # Reserved once: between two processes of the engine nobody else gets its ports.
        if self._kept is None:
            live, replay = self._endpoints
            self._kept = (self._keep(live), None if replay is None else self._keep(replay))
        self._context = zmq.Context()  # of its own: once it is terminated, the ports are free
        try:
            self.publisher = ZmqEventPublisher(
                self._dp_rank,
                *self._kept,
                dialect=self._dialect,
                bind=True,
                context=self._context,
                **self._knobs,
            )
        except BaseException:
            # Else the ports and the context would stay with an engine that was never made.
            self._context.term()
            self.forget_ports()
            raise

    def stop(self, *, hard: bool) -> None:
        """Stop the publisher; `hard`: without sending what waits."""
        if self.publisher is None or self._context is None:
            return
        if hard:  # as a killed process: what waits is lost, and subscribers see a gap
            self.publisher.shutdown(timeout=0)
        else:
            self.publisher.shutdown()
        self._context.term()
        self.publisher = self._context = None

    def forget_ports(self) -> None:
        """Free the ports; the next publisher gets new ones."""
        self._kept = None
        for holder in self._holders:
            holder.close()
        self._holders.clear()

    def _keep(self, endpoint: str) -> str:
        """The endpoint of rank 0 with which this rank gets a port that stays its own."""
        # A fixed port, ipc and inproc, and IPv6, for which no port is reserved, stay as they are.
        address, _, port = endpoint.rpartition(":")
        host = address.removeprefix("tcp://")
        if host == address or port not in ("0", "*") or host.startswith("["):
            return endpoint
        try:
            holder, number = reserve_port("0.0.0.0" if host == "*" else host)
        except OSError as error:
            raise ConfigurationError(f"no port can be had for {endpoint!r}: {error}") from error
        self._holders.append(holder)
        # The publisher adds its rank, as the engines' do.
        return f"{address}:{number - self._dp_rank}"
