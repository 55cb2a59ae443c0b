"""Opening a queue's ends: what is checked first, and how remote readers are reached."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvindex.errors import ConfigurationError
from kvindex.shm.codec import Codec
from kvindex.shm.handle import Handle
from kvindex.shm.remote.keys import CurveReader, CurveServer
from kvindex.shm.remote.reader import RemoteReader
from kvindex.shm.remote.sender import RemoteSender

__all__ = ["check_remote_codec", "local_ranks", "open_remote_reader", "open_remote_sender"]

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


def local_ranks(n_reader: int, n_local: int, ranks: Sequence[int] | None) -> list[int]:
    if not 0 <= n_local <= n_reader or n_reader < 1:
        raise ConfigurationError(
            f"n_reader must be at least 1 and n_local_reader 0 to n_reader, not {n_reader} and "
            f"{n_local}"
        )
    ranks = list(range(n_local)) if ranks is None else list(ranks)
    if len(ranks) != n_local or len(set(ranks)) != n_local:
        raise ConfigurationError(
            f"local_reader_ranks must be {n_local} different ranks, not {ranks}"
        )
    return ranks


def check_remote_codec(codec: Codec, *, encrypted: bool) -> None:
    if codec.name == "pickle" and not encrypted:
        raise ConfigurationError(
            "pickle runs whatever its bytes say, and anyone on the way can change them: use "
            "msgpack for remote readers, or encrypt with curve"
        )


def open_remote_sender(
    n_remote: int,
    connect_ip: str | None,
    *,
    window: int,
    max_message_bytes: int,
    curve: CurveServer | None,
) -> RemoteSender:
    if connect_ip is None:
        logger.warning(
            "remote readers are expected and connect_ip is not given: %s is listened on, which "
            "only this machine can reach",
            _LOOPBACK,
        )
    return RemoteSender(
        n_remote,
        connect_ip or _LOOPBACK,
        window=window,
        max_message_bytes=max_message_bytes + 1,  # the kind
        curve=curve,
    )


def open_remote_reader(
    handle: Handle, rank: int, codec: Codec, curve: CurveReader | None
) -> RemoteReader:
    if handle.remote_address is None or handle.remote_token is None:
        raise ConfigurationError(
            f"rank {rank} is none of the queue's local ranks {handle.local_reader_ranks}, and it "
            "has no remote readers"
        )
    if handle.remote_curve_key is not None and curve is None:
        curve = CurveReader.generate(handle.remote_curve_key)
    check_remote_codec(codec, encrypted=curve is not None)
    return RemoteReader(
        handle.remote_address,
        handle.remote_token,
        rank,
        max_message_bytes=handle.max_message_bytes + 1,  # the kind
        curve=curve,
    )
