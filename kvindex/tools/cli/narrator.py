"""Print the news of the ranks' streams, from the changes of their statuses."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from kvindex import Client, Rank, RankStatus, State
from kvindex.tools.cli.output import Colour, painted

__all__ = ["Narrator"]


class Narrator:
    """Prints a line for each gap, repair, loss, restart and disconnection of a client's ranks."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._started = time.monotonic()
        self._told = _ageless({rank: client.status(rank) for rank in client.ranks})
        self._latest: Mapping[Rank, RankStatus] = self._told
        self._gaps: dict[Rank, RankStatus] = {}  # ranks with an open gap, as they were before it

    def say(self, text: str, colour: Colour | None = None, *, mark: str = " ") -> None:
        """Print a line with the time since the start."""
        passed = time.monotonic() - self._started
        print(painted(f"{passed:6.2f} s {mark} {text}", colour), flush=True)

    def watch(self, seconds: float) -> None:
        """Print changes, as they happen, for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._client.wait_for(self._changed, left):
                self._tell()

    def _changed(self, statuses: Mapping[Rank, RankStatus]) -> bool:
        self._latest = _ageless(statuses)
        return any(self._latest[rank] != told for rank, told in self._told.items())

    def _tell(self) -> None:
        for rank, before in self._told.items():
            now = self._told[rank] = self._latest[rank]
            self._compare(rank, before, now)

    def _compare(self, rank: Rank, before: RankStatus, now: RankStatus) -> None:
        if before.connected and not now.connected:
            self.say(f"{rank}: disconnected; its answers are flagged {now.state!s}", "red")
        if now.connected and not before.connected:
            self.say(f"{rank}: connected again; replay shows what was missed", "green")
        if now.losses > before.losses:
            self.say(f"{rank}: batches lost for good; its blocks are dropped", "red")
        if now.restarts > before.restarts:
            self._gaps.pop(rank, None)
            self.say(f"{rank}: restart noticed; its blocks are dropped", "green")
        elif now.gaps > before.gaps:
            self._gaps.setdefault(rank, before)
            self.say(f"{rank}: a gap after batch {before.seq}", "red")
        if rank in self._gaps and now.state is State.LIVE:
            asked = now.replays_asked > self._gaps.pop(rank).replays_asked
            how = "by replay" if asked else "by late messages"
            self.say(f"{rank}: repaired {how}, whole through batch {now.seq}", "green")


def _ageless(statuses: Mapping[Rank, RankStatus]) -> dict[Rank, RankStatus]:
    """Return the statuses without the ages, which change though nothing happens."""
    replace = msgspec.structs.replace
    return {rank: replace(status, last_event_age=None) for rank, status in statuses.items()}
