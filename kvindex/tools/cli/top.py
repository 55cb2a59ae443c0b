"""`kvindex top`: the fleet at a terminal, kept up to date; through a pipe, once.

Show totals and a table of the ranks: of a running `kvindex serve`, named by its URL, or of engines
that this command subscribes to by itself. At a terminal it goes on until q or Ctrl-C; else it
prints the fleet once. Keys: s state, n name, l lag, a age, b blocks, g gaps, o losses, e restarts,
r reverses, arrows and Page Down scroll, / finds, w shows why ranks are not well, q ends.
"""

from __future__ import annotations

import argparse
import os
import ssl
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Final

import msgspec

from kvindex import Client, ConfigurationError, KVIndexError, State, connect
from kvindex.service.overview import Fleet, overview
from kvindex.tools.cli.arguments import add_cacert_option, count, option, seconds, trusting
from kvindex.tools.cli.endpoints import add_engine_options, engines_of, names_engines
from kvindex.wire.errors import UNREADABLE, DiscoveryError, how_to_install
from kvindex.wire.waker import Waker
from kvindex.wire.web import Web

SORTS: Final = {
    "state": "s",
    "name": "n",
    "lag": "l",
    "age": "a",
    "blocks": "b",
    "gaps": "g",
    "losses": "o",
    "restarts": "e",
}
"""What ranks can be sorted by, and the key for it."""

_MISSING: Final = f"kvindex top needs the package rich: {how_to_install('server')}"
_FLEET: Final = "/api/fleet"
_TIMEOUT: Final = 10.0  # seconds for a whole answer
_SILENCE: Final = 30.0  # seconds; a service sends something every 10
_MOST_BYTES: Final = 64 << 20
_MOST_LINE: Final = 8 << 20
_AGAIN: Final = 2.0  # seconds between two attempts to listen


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare this command's options."""
    text = "of a service, e.g. http://127.0.0.1:8090 (its token: KVINDEX_TOKEN)"
    parser.add_argument("url", nargs="?", metavar="URL", help=text)
    add_cacert_option(parser)
    text = "by what the table is sorted: worst, most or longest first"
    option(parser, "--sort", text, tuple(SORTS), "state")
    option(parser, "-n --ranks N", "show N ranks at most", count)
    text = "seconds between two looks; a change of state is shown at once"
    option(parser, "--every S", text, seconds, 1.0)
    text = "seconds to wait for engines to be live before the fleet is printed once"
    option(parser, "--wait S", text, seconds, 3.0)
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show the fleet until q or Ctrl-C, or print it once."""
    if names_engines(arguments) == bool(arguments.url):
        raise ConfigurationError(
            "name either a running service by its URL, or engines (--worker, --endpoint, --engine)"
        )
    try:
        from kvindex.tools.cli.top_screen import print_once, show
    except ImportError as error:
        raise ConfigurationError(f"{_MISSING} ({error})") from None
    live = sys.stdout.isatty()
    news = Waker()
    read: Callable[[], Fleet]
    with ExitStack() as stack:
        stack.callback(news.close)
        if arguments.url:
            service = stack.enter_context(closing(ServiceFleet(arguments.url, arguments.cacert)))
            read = service.read
            if live:
                service.watch(news.wake)
        else:
            client = stack.enter_context(connect(engines_of(arguments)))
            read = partial(_overview, client)
            if live:
                client.on_change(lambda _: news.wake())
            else:
                client.wait_for(
                    lambda statuses: all(s.state is State.LIVE for s in statuses.values()),
                    arguments.wait,
                )
        if not live:
            print_once(read(), sort=arguments.sort, most=arguments.ranks)
            return 0
        with suppress(KeyboardInterrupt):  # the normal end
            show(read, news, sort=arguments.sort, most=arguments.ranks, every=arguments.every)
    return 0


def _overview(client: Client) -> Fleet:
    discovery = client.discovery
    return overview(client.statistics(), missing=None if discovery is None else discovery.missing())


class ServiceError(KVIndexError):
    """A service could not be asked."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url = url
        self.reason = reason


class ServiceFleet:
    """A service's report of its fleet. Its token is in the environment, KVINDEX_TOKEN.

    Raises:
        ConfigurationError: the URL cannot work, or the file of trusted authorities cannot be read.

    Thread safety: `read` on one thread.
    """

    def __init__(self, url: str, cacert: str | None = None) -> None:
        if "//" not in url:
            url = f"http://{url}"
        token = os.environ.get("KVINDEX_TOKEN")
        self._web = Web(url, token=token, context=trusting(cacert))
        self._closed = threading.Event()

    def read(self) -> Fleet:
        """Return the fleet as it is now.

        Raises:
            ServiceError: the service cannot be asked, or answers something else.
        """
        try:
            answer = self._web.get(_FLEET, _TIMEOUT, limit=_MOST_BYTES)
            if answer.status == 200:
                return msgspec.json.decode(answer.body, type=Fleet)
            why = f"it answers {answer.status}: {answer.body[:300].decode(errors='replace')}"
            if answer.status == 401:
                why = "it requires its token: set KVINDEX_TOKEN"
            elif answer.status == 404:
                why = f"it has no {_FLEET}: is it kvindex serve?"
        except UNREADABLE as error:
            why = f"it answers something else than kvindex serve of this version ({error})"
        except DiscoveryError as error:
            why = _why_unreached(error)
        raise ServiceError(self._web.url, why)

    def watch(self, notify: Callable[[], object]) -> None:
        """Call a function whenever something happens to the fleet, until `close`."""
        threading.Thread(
            target=self._listen, args=(notify,), name="kvindex-top-news", daemon=True
        ).start()

    def close(self) -> None:
        """Listen no longer. Idempotent."""
        self._closed.set()

    def _listen(self, notify: Callable[[], object]) -> None:
        while not self._closed.is_set():
            try:
                with self._web.open("/events", _SILENCE) as news:
                    while line := news.read_line(_MOST_LINE, _SILENCE):
                        if line.startswith(b"event:"):
                            notify()
                        if self._closed.is_set():
                            return
            except DiscoveryError:
                pass  # the next read reports what is wrong
            self._closed.wait(_AGAIN)


def _why_unreached(error: DiscoveryError) -> str:
    """Return why a service was not reached; where TLS fails, a service does run."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = f"its certificate is not trusted: {cause.verify_message}"
        return f"{why}; name the file of its authority with --cacert"
    if isinstance(cause, ssl.SSLError):
        return f"TLS fails: {cause}; does it listen for https there?"
    why = str(error).removeprefix(f"{error.url}{_FLEET} ")
    return f"it {why}; is kvindex serve running there?"
