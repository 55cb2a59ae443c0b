"""Ports that stay ours while nobody listens at them."""

from __future__ import annotations

import socket

__all__ = ["reserve_port"]


def reserve_port(host: str = "127.0.0.1", port: int = 0) -> tuple[socket.socket, int]:
    """Return a free TCP port, or this one, and the socket that keeps it from others.

    The socket is bound and never listens: a server that sets SO_REUSEADDR, as libzmq does, can
    bind and listen beside it, close, and come back to the same port.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
        return holder, int(holder.getsockname()[1])
    except OSError:
        holder.close()
        raise
