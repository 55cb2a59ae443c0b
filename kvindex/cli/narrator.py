"""Tell what happens to the ranks' streams, from how their statuses change."""

from __future__ import annotations

import time

from kvindex import Client, Rank, RankStatus, State

__all__ = ["Narrator"]


class Narrator:
    """Prints a line for each gap, repair, loss, restart and disconnection of a client's ranks."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._started = time.monotonic()
        self._told = {rank: client.status(rank) for rank in client.ranks}
        self._open_gap: dict[Rank, float] = {}

    def say(self, text: str, *, mark: str = " ") -> None:
        """Print a line with the time since the start."""
        print(f"{time.monotonic() - self._started:6.2f} s {mark} {text}", flush=True)

    def look(self) -> None:
        """Print what has changed since the last look."""
        for rank, before in self._told.items():
            now = self._client.status(rank)
            if now != before:
                self._told[rank] = now
                self._compare(rank, before, now)

    def _compare(self, rank: Rank, before: RankStatus, now: RankStatus) -> None:
        if now.restarts > before.restarts:
            self.say(f"{rank}: restart noticed: its blocks are dropped, epoch {now.epoch} begins")
        if now.losses > before.losses:
            self.say(f"{rank}: batches lost for good: its blocks are dropped")
        if before.connected and not now.connected:
            self.say(f"{rank}: disconnected; answers are flagged {now.state}")
        if now.connected and not before.connected:
            self.say(f"{rank}: connected again; replay shows what was missed")
        if now.gaps > before.gaps or (now.state == State.REPAIRING and rank not in self._open_gap):
            self._open_gap.setdefault(rank, time.monotonic())
        if rank in self._open_gap and now.state == State.LIVE:
            took = (time.monotonic() - self._open_gap.pop(rank)) * 1000
            asked = now.replays_asked - before.replays_asked
            self.say(f"{rank}: gap repaired through seq {now.seq} ({took:.0f} ms, {asked})")
