"""A load balancer for verl's rollouts, named in its router's YAML: docs/how-to/verl.md says how."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from kvindex.client import connect
from kvindex.routing import Booking, Router, reads_cache
from kvindex.subscribe import Worker
from kvindex.wire.errors import ConfigurationError, TokenError

__all__ = ["KVAwareBalancer"]

_STICKY = 10_000  # requests whose servers are remembered, as verl's own balancer does


class KVAwareBalancer:
    """Sends a rollout's requests where `kvindex.routing` chooses; verl's `RequestLoadBalancer`.

    The later turns of a request go where its first went, until the server leaves, or verl clears
    the sticky cache. If a prompt's tokens cannot be read, the least loaded server gets it. verl
    reports no first tokens: until a request is released, its prompt counts as waiting for prefill.

    Args:
        servers: a handle for each server's id, "host:port".
        config: the YAML. `worker`: options of a `Worker`, where "{host}" stands for the server's
            host; or `worker_of`: "module:function", which gets a server's id and handle and returns
            its `Worker`. `router`: options of the `Router`. `lora`: the adapter of all requests.
            `sticky`: false to choose anew for each turn.

    Raises:
        ConfigurationError: neither `worker` nor `worker_of` is there.

    Thread safety: none needed; verl makes it a Ray actor, which runs one call at a time.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        if not (config.get("worker") or config.get("worker_of")):
            raise ConfigurationError("`worker` or `worker_of` must say where servers' events are")
        self._config = config
        self._servers: dict[str, Any] = {}
        self._open: dict[str, dict[str, list[Booking]]] = {}  # by server, by request
        self._homes: dict[str, str] = {}  # the server of a request; the longest unused first
        self._unread = 0  # prompts
        self._client = connect()
        # The index alone: verl reports which servers exist, not whether their events come.
        self._router = Router(self._client.index, **(config.get("router") or {}))
        self.add_servers(servers)

    def acquire_server(
        self, request_id: str, prompt_ids: Any = None, sampling_params: Any = None, **_: Any
    ) -> tuple[str, Any]:
        """Choose a server, book the request there, and return the server's id and handle.

        Raises:
            RuntimeError: there is no server; verl recognises the type and the message.
        """
        if not self._servers:
            raise RuntimeError("No available servers in load balancer")
        home = self._homes.pop(request_id, None)
        reads = not isinstance(sampling_params, Mapping) or reads_cache(sampling_params)
        token_ids = () if prompt_ids is None else prompt_ids
        lora, ranks = self._config.get("lora"), home if home in self._servers else None
        try:
            booking = self._router.reserve(token_ids, lora=lora, ranks=ranks, reads_cache=reads)
        except TokenError:
            self._unread += 1
            booking = self._router.reserve((), ranks=ranks)
        server_id = booking.rank.worker
        self._open[server_id].setdefault(request_id, []).append(booking)
        if self._config.get("sticky", True):
            self._homes[request_id] = server_id
            if len(self._homes) > _STICKY:
                del self._homes[next(iter(self._homes))]
        return server_id, self._servers[server_id]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """End the booking of a request, if its server has not left."""
        requests = self._open.get(server_id, {})
        if bookings := requests.get(request_id or ""):
            bookings.pop().finish()
            if not bookings:
                del requests[request_id or ""]

    def require_acquire_fields(self) -> list[str]:
        """Return the fields that verl must send beside a request's id."""
        return ["prompt_ids", "sampling_params"]

    def require_release_fields(self) -> list[str]:
        """Return the fields that verl must send at the end."""
        return ["request_id"]

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Subscribe to more servers' events, and send requests there."""
        self.remove_servers(servers)  # those that return
        for server_id, handle in servers.items():
            if named := self._config.get("worker_of"):
                worker = replace(pkgutil.resolve_name(named)(server_id, handle), name=server_id)
            else:
                host = server_id.rpartition(":")[0]
                options = dict(self._config["worker"])
                texts = {k: v.format(host=host) for k, v in options.items() if isinstance(v, str)}
                worker = Worker(server_id, **{**options, **texts})
            self._client.add(worker)
            self._servers[server_id] = handle
            self._open[server_id] = {}

    def remove_servers(self, server_ids: Iterable[str]) -> None:
        """Forget servers, their blocks, and their open requests."""
        for server_id in list(server_ids):
            if self._servers.pop(server_id, None) is None:
                continue
            for bookings in self._open.pop(server_id).values():
                for booking in bookings:
                    booking.cancel()
            self._client.remove(server_id)

    def get_all_servers(self) -> list[str]:
        """Return the servers' ids."""
        return list(self._servers)

    def get_status(self) -> dict[str, Any]:
        """Return the open requests of each server, and kvindex's counters."""
        loads = self._loads()
        return {
            "servers": loads,
            "total_inflight": sum(loads.values()),
            "active_servers": len(loads),
            "events": {str(rank): str(self._client.status(rank)) for rank in self._client.ranks},
            "routing": {**self._router.statistics(), "unread": self._unread},
        }

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget which server a request belongs to; return how many were forgotten."""
        cleared = len(self._homes)
        self._homes.clear()
        return {"cleared_entries": cleared, "server_loads": self._loads()}

    def get_total_inflight(self) -> int:
        """Return how many requests are open on all servers."""
        return sum(self._loads().values())

    def _loads(self) -> dict[str, int]:
        return {name: sum(map(len, requests.values())) for name, requests in self._open.items()}
