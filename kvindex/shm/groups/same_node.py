"""Which ranks share memory with one of them: by proof, not by the name of a host.

Containers on one machine may have a /dev/shm each, and two machines may have one name. So rank
`source` puts a secret into shared memory, sends its name to the others, and accepts those that
return the secret.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from typing import Any, Final

from kvindex.shm.groups.process_group import ProcessGroup
from kvindex.shm.ring import Segment
from kvindex.wire.errors import SegmentError

__all__ = ["ranks_that_share_memory"]

MAGIC: Final = b"kvindex same node"  # begins the memory, so that no rank reveals other memory
_SECRET_BYTES: Final = 32

logger = logging.getLogger(__name__)


def ranks_that_share_memory(group: ProcessGroup, source: int) -> list[bool]:
    """Return at every rank, for each rank, whether it shares memory with rank `source`. Collective.

    A rank of another user does not, since segments are private to their user. If rank `source` has
    no shared memory, no rank shares it: all are False, its own entry too.

    Raises: what `group` raises.
    """
    secret = secrets.token_bytes(_SECRET_BYTES)
    offered = _offer(secret) if group.rank == source else None
    try:
        name = group.broadcast_object(offered and offered.name, source)
        answers = group.gather_object(_read(name), source) or []
    finally:
        if offered is not None:
            offered.close()
    verdict = group.broadcast_object([_is_secret(answer, secret) for answer in answers], source)
    shared = [item is True for item in verdict] if isinstance(verdict, list) else []
    return [*shared, *[False] * group.world_size][: group.world_size]


def _offer(secret: bytes) -> Segment | None:
    try:
        return Segment.make(len(MAGIC) + len(secret), MAGIC + secret)
    except SegmentError as error:
        logger.warning("no rank can share memory with this one: %s", error)
        return None


def _read(name: Any) -> bytes | None:
    """The secret in the memory of that name; None without one."""
    if not isinstance(name, str):
        return None
    try:
        segment = Segment.attach(name)
    except SegmentError:
        return None
    found = segment.memory[: len(MAGIC) + _SECRET_BYTES]
    segment.close()
    return found[len(MAGIC) :] if found.startswith(MAGIC) else None


def _is_secret(answer: Any, secret: bytes) -> bool:
    return isinstance(answer, bytes) and hmac.compare_digest(answer, secret)
