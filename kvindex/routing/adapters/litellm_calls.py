"""LiteLLM's calls and their bookings, where LiteLLM has no hooks.

Hooks are missing for the beginning of a stream, and for the end of an abandoned call.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvindex.routing import Booking, Router, UnknownBookingError

__all__ = ["CallId", "booking_of", "cancel_with", "report_first_token"]


class CallId(str):
    """LiteLLM's id of a call. Only the call holds it, so Python frees it with the call."""


def booking_of(request: Mapping[str, Any], router: Router) -> Booking | None:
    """Return the open booking of a call; None if it has none."""
    with suppress(UnknownBookingError):
        return router.booking(request.get("litellm_call_id") or "")
    return None


def cancel_with(call_id: CallId, booking: Booking) -> None:
    """Cancel a booking when its call is freed: if it was cancelled, or its stream left.

    Python frees some calls at once, and others when it next collects garbage, even in the middle
    of the router's own work. So the event loop cancels later, and not this call at once.
    """
    finalizer = weakref.finalize(call_id, _cancel_soon, asyncio.get_running_loop(), booking)
    finalizer.atexit = False


def _cancel_soon(loop: asyncio.AbstractEventLoop, booking: Booking) -> None:
    with suppress(RuntimeError):  # the loop is closed: the booking expires
        loop.call_soon_threadsafe(booking.cancel)


def report_first_token(call: Any, booking: Booking) -> None:
    """Make LiteLLM's record of a call notify a booking of the stream's first chunk."""
    update, record = type(call).update_completion_start_time, weakref.proxy(call)

    def report(completion_start_time: Any) -> None:
        booking.first_token()
        update(record, completion_start_time)

    call.update_completion_start_time = report
