"""One relay that writes a pool's events to NATS, and replicas of its index on any machine.

    relay = nats.Relay(workers, "nats://n1,n2", pool="llama")          # on one machine, or two
    replica = nats.join("nats://n1,n2", pool="llama", timeout=30.0)    # on each of the others
    replica.match(token_ids).best

```
engines ─► Client ─ StreamTap ─ LogQueue ─ LogWriter ══ stream ══► Follower ─ Copy ─ Replica
             └────── snapshot ────── object store ── when joining ──►
```

NATS carries, the relay's index is the truth. The log promises nothing: what it loses, forgets or
gets from others is noticed by its numbers, and a snapshot heals it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvindex.index.snapshot import require_native
from kvindex.replicas.nats.following import LogOrigin
from kvindex.replicas.nats.relay import Relay
from kvindex.replicas.replica import Follower, Replica, check_seconds, joined
from kvindex.wire.errors import NatsError, QueueTimeoutError
from kvindex.wire.nats import NatsOptions, parse_pool, require_nats

if TYPE_CHECKING:  # no dependency: editors and type checkers have it
    from typing_extensions import Unpack

__all__ = ["NatsError", "QueueTimeoutError", "Relay", "Replica", "follow", "join"]


def join(
    url: str,
    pool: str | None = None,
    timeout: float = 30.0,
    *,
    stale_after: float = 3.0,
    **options: Unpack[NatsOptions],
) -> Replica:
    """Return a replica of the index of the relay that writes a pool's log.

    It returns when the replica has all that the log had, ranks that are not live included:
    `Replica.wait_live` waits for those. It waits for a relay that is not there yet. Ranks are stale
    until the relay has appended to the log since.

    Args:
        url: "nats://HOST[:PORT][,HOST[:PORT]…][/POOL]"; tls:// instead of nats:// for TLS.
        pool: the pool's name, unless the URL has it.
        timeout: longest wait, in seconds.
        stale_after: seconds without a message of the relay after which ranks are shown as stale;
            a relay sends one every second.
        options: how the connection is secured; `NatsOptions` has them.

    Raises:
        QueueTimeoutError: the replica was not complete in time (a TimeoutError); it says why.
        ConfigurationError: a value cannot work, nats-py is missing, or the index is the Python one.
    """
    check_seconds(timeout=timeout)
    return joined(_follower(url, pool, stale_after, options), timeout)


def follow(
    url: str,
    pool: str | None = None,
    *,
    stale_after: float = 3.0,
    **options: Unpack[NatsOptions],
) -> Replica:
    """Return such a replica at once: it has no rank until it has joined by itself.

    Args: as `join`.

    Raises:
        ConfigurationError: as `join`.
    """
    return Replica(_follower(url, pool, stale_after, options))


def _follower(url: str, pool: str | None, stale_after: float, options: NatsOptions) -> Follower:
    require_native()
    require_nats()
    check_seconds(stale_after=stale_after)
    return Follower(LogOrigin(parse_pool(url, pool, options), stale_after), stale_after)
