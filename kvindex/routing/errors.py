"""What routing raises, beside the errors of the index."""

from __future__ import annotations

from collections.abc import Mapping

from kvindex.errors import KVIndexError

__all__ = ["DuplicateBookingError", "NoCandidateError", "UnknownBookingError"]


class NoCandidateError(KVIndexError, LookupError):
    """No rank may be chosen for a request.

    Attributes:
        ranks: how many ranks are known.
        refused: by reason (a filter's name, "drained", "ranks"), how many ranks it refused.
    """

    def __init__(self, ranks: int, refused: Mapping[str, int]) -> None:
        why = ", ".join(f"{reason} refuses {count}" for reason, count in refused.items())
        super().__init__(
            f"none of {ranks} ranks may be chosen: {why}"
            if ranks
            else "no rank is known yet: wait for the client to be live, or add ranks to the index"
        )
        self.ranks = ranks
        self.refused = dict(refused)


class DuplicateBookingError(KVIndexError, ValueError):
    """A request id that an open booking has already.

    Attributes:
        request_id: the id.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request {request_id!r} has an open booking: finish or cancel it, or give another id"
        )
        self.request_id = request_id


class UnknownBookingError(KVIndexError, KeyError):
    """A request id that no open booking has: never booked, ended, or expired.

    Attributes:
        request_id: the id.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(f"no open booking of request {request_id!r}: it ended, or has expired")
        self.request_id = request_id

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show it quoted
