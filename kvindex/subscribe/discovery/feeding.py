"""Feeds a client from the engines that it was given by URL or by a source."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Set
from typing import Protocol

from kvindex.subscribe import RankStatus, State, Worker
from kvindex.subscribe.discovery.discovery import Discovery
from kvindex.subscribe.discovery.options import DiscoveryOptions
from kvindex.subscribe.discovery.targets import Found, Source
from kvindex.wire.errors import ClosedError, UnknownRankError
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName

__all__ = ["follow_engines"]


class Fed(Protocol):
    """A client, as far as discovery feeds it."""

    def add(self, worker: Worker) -> None: ...

    def remove(self, name: RankName) -> None: ...

    def connected_ranks(self) -> Set[Rank]: ...

    def on_change(self, callback: Callable[[RankStatus], object]) -> Callable[[], None]: ...


def follow_engines(
    client: Fed, sources: Iterable[Source], options: DiscoveryOptions | None
) -> Discovery:
    """Return a discovery that feeds a client, for as long as the client is referenced."""
    held = weakref.ref(client)

    def living() -> Fed:
        found = held()
        if found is None:
            raise ClosedError("the client was dropped")
        return found

    def remove(found: Found) -> None:
        name = found.worker.name
        ranks = [Rank(name, address.dp_rank) for address in found.worker.publishers()]
        for rank in ranks if found.is_part else [name]:
            try:
                living().remove(rank)
            except UnknownRankError:
                pass  # another caller removed it

    def is_alive(worker: str) -> bool:
        return any(rank.worker == worker for rank in living().connected_ranks())

    discovery = Discovery(
        sources, lambda found: living().add(found.worker), remove, options, is_alive=is_alive
    )
    client.on_change(_asking_again(discovery))
    weakref.finalize(client, discovery.end).atexit = False
    return discovery


def _asking_again(discovery: Discovery) -> Callable[[RankStatus], None]:
    """Return a listener that asks an engine at once when it hangs up: its ports may change."""
    met: set[Rank] = set()

    def look(status: RankStatus) -> None:
        if status.state is State.LIVE:
            met.add(status.rank)
        elif status.rank in met:
            met.discard(status.rank)
            discovery.refresh(status.rank.worker)

    return look
