"""One `kvindex serve`: subscriber, registrations, discovery, state, HTTP, and their order."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import msgspec

from kvindex import Client, ConfigurationError, KVIndexError, SnapshotError
from kvindex.replicas import Replica, nats
from kvindex.service.app import app_routes
from kvindex.service.catalog import Partition
from kvindex.service.exposition import Exposition
from kvindex.service.http.guards import Guard, Networks
from kvindex.service.http.messages import Route
from kvindex.service.http.server import HttpServer
from kvindex.service.http.site import Site
from kvindex.service.page import Page
from kvindex.service.registry import FollowedRegistry, Registry
from kvindex.service.service import Service
from kvindex.service.settings import ConfigFile, ServeSettings, Table
from kvindex.service.sources import BLOCK_SIZE
from kvindex.service.state import Saver, fetch_snapshot, read_registrations, snapshot_route
from kvindex.subscribe.discovery import Discovery, DiscoveryOptions, Engine, Source
from kvindex.wire.nats import NatsPool

logger = logging.getLogger(__name__)

_FIRST_LOOK: Final = 1.0  # seconds for sources to report workers before requests are answered
_FIRST_ADDED: Final = 60.0  # seconds for those that they named at once to be subscribed to
_BEING_ADDED: Final = "it is being added"


class Server:
    """A server that listens; `run` serves until `stop`, and `close` takes it all down.

    Args:
        settings: how to serve.
        sources: they list workers.
        tokens: any of them admits a request; none: no token is needed.
        max_blocks_per_rank: as in `kvindex.connect`.
        engine_token: returns the engines' API key.
        pool: whose relay it follows, in place of engines: it registers, discovers and saves none.

    Raises:
        ConfigurationError: a setting cannot work.
        SnapshotError: the state file cannot be continued from.
        OSError: it cannot listen, or a file cannot be read.

    Owner: the thread that makes it; `stop` from any, and from signal handlers.
    """

    def __init__(
        self,
        settings: ServeSettings,
        sources: Iterable[Source] = (),
        *,
        tokens: Sequence[str] = (),
        max_blocks_per_rank: int | None = None,
        engine_token: Callable[[], str | None] | None = None,
        pool: NatsPool | None = None,
    ) -> None:
        self.settings = settings
        self.pool = pool
        sources = list(sources)
        if pool is not None:
            _refuse_what_is_of_the_relay(settings, sources)
        self._tokens = tuple(tokens)
        self._networks = Networks(settings.networks())
        with ExitStack() as opened:
            # First: another server at this port is found before anything is subscribed to.
            self._socket = settings.listen()
            opened.callback(self._socket.close)
            self.port: int = self._socket.getsockname()[1]
            self._answering = self._source(max_blocks_per_rank)
            opened.callback(self._answering.close)
            self.service = self._new_service()
            self._saver = self._new_saver()
            self._news = threading.Event()  # what discovery misses may have changed
            self._discovery = Discovery(
                sources,
                self._found,
                self._lost,
                options=DiscoveryOptions(token=engine_token),
                is_alive=lambda worker: any(
                    rank.worker == worker for rank in self._answering.connected_ranks()
                ),
                on_change=self._news.set,
            )
            opened.callback(self._discovery.close)
            self.service.missing = self._missing
            # Clients ask at once, and should find the engines that are there.
            self.missing = self._first_missing()  # `kvindex serve` prints it
            self._guard = Guard(
                tokens=self._tokens,
                allowed_hosts=settings.allowed_hosts,
                allowed_origins=settings.allowed_origins,
                limits=settings.limits,
            )
            self._page = Page(self.service, tokenizer=settings.tokenizer, guard=self._guard)
            opened.callback(self._page.close)
            self.routes = self._new_routes()
            self.site = Site(self.routes, self._guard, self.service.traffic.request)
            self._server = HttpServer(
                self.site, shutdown_within=settings.shutdown_within, tls=settings.tls
            )
            self._opened = opened.pop_all()

    def _missing(self) -> dict[str, str]:
        """Return which engines and sources did not report their endpoints, and why."""
        # Without a reason: it was found, and is being added.
        missing = self._discovery.missing()
        if isinstance(self._answering, Replica) and self._answering.trouble:
            missing[str(self.pool)] = self._answering.trouble
        return {name: why or _BEING_ADDED for name, why in missing.items()}

    def _first_missing(self) -> dict[str, str]:
        """Return the same once the workers of files and options, which lack a reason, are added."""
        begun = time.monotonic()
        while missing := self._discovery.missing():
            patience = _FIRST_ADDED if "" in missing.values() else _FIRST_LOOK
            left = begun + patience - time.monotonic()
            if left <= 0:
                break
            self._discovery.check_open()
            self._news.wait(left)
            # Before the next look: a change that comes after it sets it again.
            self._news.clear()
        return self._missing()

    # Its parts --------------------------------------------------------------------------------

    def _source(self, max_blocks_per_rank: int | None) -> Client | Replica:
        """Return what follows the engines or the relay, continued from the best state there is."""
        if self.pool is not None:
            return nats.follow(str(self.pool), **self.pool.options)
        state, neighbour = self.settings.state, self.settings.warm_from
        if state is not None and os.path.exists(state) and not os.path.isfile(state):
            raise ConfigurationError(f"--state {state}: it is no ordinary file")
        if neighbour is not None:
            with tempfile.TemporaryDirectory(prefix="kvindex-serve-") as folder:
                path = os.path.join(folder, "warm")
                try:
                    token = self._tokens[0] if self._tokens else None
                    fetch_snapshot(neighbour, path, token=token)
                except OSError as error:
                    logger.warning("no warm start from %s: %s", neighbour, error)
                else:
                    try:
                        return Client((), resume=path, max_blocks_per_rank=max_blocks_per_rank)
                    except SnapshotError as error:
                        logger.warning("the snapshot of %s is of no use: %s", neighbour, error)
        try:
            return Client((), resume=state, max_blocks_per_rank=max_blocks_per_rank)
        except SnapshotError as error:
            # A neighbour's snapshot only saves time. This state is the operator's to give up.
            raise SnapshotError(
                f"--state {error}; to start without it, delete it or move it away",
                reason=error.reason,
            ) from error

    def _new_service(self) -> Service:
        settings, limits, client = self.settings, self.settings.limits, self._answering
        registry: Registry | FollowedRegistry
        if isinstance(client, Client):
            registry = Registry(
                client,
                dial=lambda endpoint: self._networks.check(endpoint),  # a file brings new networks
                max_ranks=limits.ranks,
                max_ranks_per_instance=limits.ranks_per_instance,
            )
        else:
            partition = Partition(settings.model, settings.routing_group)
            registry = FollowedRegistry(client, str(self.pool), partition, settings.block_size or 0)
        return Service(client, registry, dialect=settings.dialect, max_tokens=limits.tokens)

    def _new_saver(self) -> Saver | None:
        """Register again what was saved beside the state; return what saves from now on."""
        state, client = self.settings.state, self._answering
        if state is None:
            return None
        assert isinstance(client, Client)
        # Before the saver listens: with the first of them it would write the file that is read.
        for entry in read_registrations(state):
            try:
                self.service.registry.register(entry)
            except KVIndexError as error:
                logger.warning(
                    "%s/%d is not registered again: %s", entry.worker, entry.dp_rank, error
                )
        folder = os.path.dirname(os.path.abspath(state))
        if not os.access(folder, os.W_OK):
            raise ConfigurationError(f"--state: nothing can be written in {folder}")
        saver = Saver(client, state, self.settings.save_every)
        self.service.registry.on_change(saver.note)
        return saver

    def _new_routes(self) -> list[Route]:
        exposition = Exposition(
            self.service, self.statistics, dynamo_names=self.settings.compat_metrics
        )
        client = self._answering
        saved = [snapshot_route(client)] if isinstance(client, Client) else []
        return app_routes(
            self.service, routes=[*saved, *self._page.routes], metrics=exposition.write
        )

    # Changes ----------------------------------------------------------------------------------

    def _found(self, engine: Engine) -> None:
        labels = dict(engine.labels)
        block_size = int(labels.pop(BLOCK_SIZE, 0))
        details: Table = {"labels": labels} if labels else {}
        # The page asks this engine for the tokens of a text.
        url = engine.url or self.settings.tokenizer
        if url is not None:
            details["engine"] = url
        self.service.registry.add(
            engine.worker,
            Partition(engine.model or self.settings.model, engine.routing_group),
            block_size=block_size,
            source=engine.source,
            **details,
        )

    def _lost(self, engine: Engine) -> None:
        self.service.registry.unregister(engine.worker.name)

    def reconfigure(self, config: ConfigFile, options: Mapping[str, Any]) -> None:
        """Apply settings that can change while it runs: the networks of registrations. Any thread.

        The command line's `options` count for more than the file's. If a setting cannot work, a
        ConfigurationError says so, and nothing has changed.
        """
        new = ServeSettings(**{**config.serve, **options})
        self._networks = Networks(new.networks())
        others = [
            name
            for name in new.__struct_fields__
            if name != "register_networks" and getattr(new, name) != getattr(self.settings, name)
        ]
        if others:
            logger.warning("these settings count from the next start on: %s", ", ".join(others))

    # Its life ---------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where it is reached from this machine."""
        return self.settings.url(self.port)

    def run(self) -> None:
        """Serve until `stop`."""
        self._server.run(self._socket)

    def stop(self) -> None:
        """Finish the open requests and make `run` return."""
        self._server.stop()

    def statistics(self) -> dict[str, Any]:
        """Return counters as plain JSON-ready values; None where there is no such part."""
        return {
            "refused": self._guard.counters.copy(),
            "streams": msgspec.to_builtins(self._page.streams),
            "discovery": self._discovery.statistics(),
            "state": None if self._saver is None else self._saver.statistics(),
        }

    def close(self) -> bool:
        """Save, and close everything; return whether the state was saved. Idempotent."""
        # Nothing may be added or removed while it is saved, and the client is needed for that.
        self._discovery.close()
        saver, self._saver = self._saver, None
        saved = saver is None or saver.close()
        self._opened.close()
        return saved

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _refuse_what_is_of_the_relay(settings: ServeSettings, sources: Sequence[Source]) -> None:
    names = ("state", "warm_from", "register_networks")
    refused = [f"--{name.replace('_', '-')}" for name in names if getattr(settings, name)]
    refused += [source.name for source in sources]
    if refused:
        raise ConfigurationError(
            f"--from follows a relay, which has the engines and the state: {refused[0]} cannot be "
            "given beside it"
        )
