"""A LiteLLM callback, for its SDK's Router and its proxy: docs/how-to/litellm.md says how."""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from litellm.integrations.custom_logger import CustomLogger

from kvindex.routing import Booking, Router, UnknownBookingError, reads_cache
from kvindex.wire.errors import UnknownRankError
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName, find_ranks

__all__ = ["KVAwareCallback", "Tokenize"]

logger = logging.getLogger(__name__)
Tokenize: TypeAlias = Callable[[Mapping[str, Any]], Any]
"""Returns a request's token ids as its engine will see them, or an awaitable of them, or None."""


class KVAwareCallback(CustomLogger):
    """Leaves LiteLLM the deployment that `kvindex.routing` chooses, and books the request there.

    A deployment stands for a worker or a rank of the index: that in `ranks` under its id, or that
    in its `model_info["kvindex_rank"]`, or that named like its id. If the worker has several
    ranks, the header X-data-parallel-rank tells the engine which, counted from its first one.

    Where a request's tokens or a deployment's ranks are unknown, LiteLLM chooses among all.
    `counts` has the reason: "no tokens", or the error's name; the first of each is logged. It also
    counts the "routed" requests and, of these, the "overruled", which LiteLLM sent elsewhere.

    A booking ends when the answer is whole, or the attempt fails. LiteLLM does not report calls
    that are cancelled and streams that are left: their bookings end when Python frees the call.

    Args:
        router: chooses among the ranks.
        tokenize: receives the request as LiteLLM has it: "model" (the group's name), "messages",
            and options such as "tools". Where it returns None, LiteLLM chooses.
        ranks: the worker or rank of a deployment, by the deployment's id.

    Thread safety: of one event loop; LiteLLM calls it in asynchronous calls only.
    """

    def __init__(
        self, router: Router, tokenize: Tokenize, *, ranks: Mapping[str, RankName] | None = None
    ) -> None:
        super().__init__()
        self.router = router
        self.counts: Counter[str] = Counter()
        self.number = id(self)  # LiteLLM keeps only one of several loggers with equal fields
        self._tokenize = tokenize
        self._names = dict(ranks or {})

    async def async_filter_deployments(
        self,
        model: str,
        healthy_deployments: list[Any],
        messages: list[Any] | None,
        request_kwargs: dict[str, Any] | None = None,
        parent_otel_span: Any = None,
    ) -> list[Any]:
        """Return the deployments of the rank that was chosen and booked; all, if that fails."""
        request = {} if request_kwargs is None else request_kwargs
        self._end(request)  # an attempt before this one, under the same id
        try:
            tokens = self._tokenize({**request, "model": model, "messages": messages})
            tokens = await tokens if inspect.isawaitable(tokens) else tokens
            if tokens is not None:
                ranks = [self._ranks_of(deployment) for deployment in healthy_deployments]
                chosen = self._book(tokens, request, {rank for each in ranks for rank in each})
                pairs = zip(healthy_deployments, ranks, strict=True)
                return [deployment for deployment, its_ranks in pairs if chosen in its_ranks]
            self.counts["no tokens"] += 1
        except Exception as error:  # on any error the request can still be served
            self.counts[kind := type(error).__name__] += 1
            if self.counts[kind] == 1:
                logger.warning("LiteLLM chooses by itself: %s: %s", kind, error)
        return healthy_deployments

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> Any:
        """Send the engine its rank, and report the first token to the booking."""
        if (booking := _booking_of(kwargs, self.router)) is None:
            return None
        ranks: list[Rank] = []
        with suppress(UnknownRankError):  # the rank has left the index
            ranks = self._ranks_of(kwargs)
        if booking.rank not in ranks:
            self.counts["overruled"] += 1
            return booking.cancel()
        if kwargs.get("stream"):
            _report_first_token(kwargs["litellm_logging_obj"], booking)
        if len(ranks) == 1:
            return None
        header = {"X-data-parallel-rank": str(booking.rank.dp_rank - ranks[0].dp_rank)}
        return {**kwargs, "extra_headers": {**(kwargs.get("extra_headers") or {}), **header}}

    async def async_post_call_success_deployment_hook(
        self, request_data: Any, response: Any, call_type: Any
    ) -> None:
        """End the booking of an answer in one piece."""
        self._end(request_data, response)

    async def async_post_call_failure_deployment_hook(self, request_data: Any, *_: Any) -> None:
        """End the booking of an attempt that failed."""
        self._end(request_data)

    async def async_log_success_event(
        self, kwargs: Any, response_obj: Any, *_: Any, **__: Any
    ) -> None:
        """End the booking of a stream, or of an answer from LiteLLM's own cache."""
        metadata = (kwargs.get("litellm_params") or {}).get("metadata") or {}
        unfinished = kwargs.get("cache_hit") or metadata.get("client_disconnected")
        self._end(kwargs, None if unfinished else response_obj)

    async def async_log_failure_event(self, kwargs: Any, *_: Any, **__: Any) -> None:
        """End the booking of a stream that broke off."""
        self._end(kwargs)

    def _ranks_of(self, deployment: Mapping[str, Any]) -> list[Rank]:
        info: Mapping[str, Any] = deployment.get("model_info") or {}
        name = self._names.get(info.get("id", "")) or info.get("kvindex_rank") or info.get("id")
        return find_ranks(name, self.router.ranks)

    def _book(self, token_ids: Any, request: dict[str, Any], ranks: set[Rank]) -> Rank:
        body = {**request, **(request.get("extra_body") or {})}
        call_id = _CallId(request.get("litellm_call_id") or uuid.uuid4())
        booking = self.router.reserve(
            token_ids,
            request_id=str(call_id),
            salt=body.get("cache_salt") or None,
            reads_cache=reads_cache(body),
            ranks=None if len(ranks) == len(self.router.ranks) else ranks,
        )
        request["litellm_call_id"] = call_id
        # Python frees the id with its call: also one that was cancelled, or whose stream was left.
        # Some calls it frees at once, and others when it next collects garbage, even in the middle
        # of the router's own work. So the event loop cancels later, and not the finalizer at once.
        finalizer = weakref.finalize(call_id, _cancel_soon, asyncio.get_running_loop(), booking)
        finalizer.atexit = False
        self.counts["routed"] += 1
        return booking.rank

    def _end(self, request: Mapping[str, Any], answer: Any = None) -> None:
        """Finish a request's booking if it is open; cancel it if there is no answer."""
        booking = _booking_of(request, self.router)
        if booking is not None and answer is not None:
            details = getattr(getattr(answer, "usage", None), "prompt_tokens_details", None)
            options = {**request, **(request.get("optional_params") or {})}
            # Of several answers vLLM reports the last one's hit: the blocks of the first.
            is_single = options.get("n") in (None, 1)
            booking.finish(getattr(details, "cached_tokens", None) if is_single else None)
        elif booking is not None:
            booking.cancel()


# LiteLLM has no hooks for the beginning of a stream, and for the end of an abandoned call.


class _CallId(str):
    """LiteLLM's id of a call, which only the call holds, so that Python frees both together."""


def _booking_of(request: Mapping[str, Any], router: Router) -> Booking | None:
    """Return the open booking of a call; None if it has none."""
    with suppress(UnknownBookingError):
        return router.booking(request.get("litellm_call_id") or "")
    return None


def _cancel_soon(loop: asyncio.AbstractEventLoop, booking: Booking) -> None:
    with suppress(RuntimeError):  # the loop is closed: the booking expires
        loop.call_soon_threadsafe(booking.cancel)


def _report_first_token(call: Any, booking: Booking) -> None:
    """Make LiteLLM's record of a call notify a booking of the stream's first chunk."""
    update, record = type(call).update_completion_start_time, weakref.proxy(call)

    def report(completion_start_time: Any) -> None:
        booking.first_token()
        update(record, completion_start_time)

    call.update_completion_start_time = report
