"""`kvindex top`: the fleet at a terminal, drawn on news, steered by keys; through a pipe, once."""

from __future__ import annotations

import argparse
import os
import re
import select
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from importlib.util import find_spec
from typing import Any, Final

import msgspec

from kvindex import ConfigurationError, KVIndexError, NotLiveError, State, connect
from kvindex.service.overview import Fleet, RankView, Totals, overview
from kvindex.tools.cli.arguments import add_cacert_option, count, option, seconds, trusting
from kvindex.tools.cli.engines import add_engine_options, engines_of, names_engines
from kvindex.tools.cli.output import counted, in_options, printable
from kvindex.wire.errors import UNREADABLE, DiscoveryError, how_to_install
from kvindex.wire.waker import Waker
from kvindex.wire.web import Web

if find_spec("rich") is not None:  # an extra package, without which there is a help only
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

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

_FLEET: Final = "/api/fleet"
_TIMEOUT: Final = 10.0  # seconds for a whole answer
_SILENCE: Final = 30.0  # seconds; a service sends something every 10
_MOST_BYTES: Final = 64 << 20
_MOST_LINE: Final = 8 << 20
_AGAIN: Final = 2.0  # seconds between two attempts to listen
_COLOURS: Final = {
    "live": "green",
    "syncing": "cyan",
    "repairing": "yellow",
    "stale": "yellow",
    "connecting": "red",
    "closed": "bright_black",
}
_HEADER: Final = (
    *("rank", "model", "state", "complete", "lag", "idle s"),
    *("blocks", "gaps", "losses", "restarts"),
)
_NUMBERS: Final = ("lag", "idle s", "gaps", "losses", "restarts")
_WORST = [State.LIVE, State.SYNCING, State.STALE, State.REPAIRING, State.CONNECTING, State.CLOSED]
_KEYS: Final[Mapping[str, Callable[[RankView], Any]]] = {
    "state": lambda rank: (_WORST.index(State(rank.state)), not rank.complete),
    "lag": lambda rank: rank.lag,
    "age": lambda rank: float("inf") if rank.last_event_age is None else rank.last_event_age,
    "blocks": lambda rank: sum(rank.blocks.values()),
    "gaps": lambda rank: rank.gaps,
    "losses": lambda rank: rank.losses,
    "restarts": lambda rank: rank.restarts,
}
_WIDE: Final = 10_000  # columns: what a program reads is not cut
_FRAME: Final = 8  # lines around the ranks and their reasons
_REASONS: Final = 3
_MOST_MISSING: Final = 5
_SEQUENCES: Final = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
}
_STEPS: Final = {"up": -1, "down": 1}
_PAGES: Final = {"page up": -1, "page down": 1, " ": 1}


def add_top_options(parser: argparse.ArgumentParser) -> None:
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


def run_top(arguments: argparse.Namespace) -> int:
    """Show the fleet at a terminal, kept up to date; through a pipe, once.

    Show totals and a table of the ranks: of a running `kvindex serve`, named by its URL, or of
    engines that this command subscribes to by itself. At a terminal it goes on until q or Ctrl-C;
    else it prints the fleet once. Keys: s state, n name, l lag, a age, b blocks, g gaps, o losses,
    e restarts, r reverses, arrows and Page Down scroll, / finds, w shows why ranks are not well, q
    ends.
    """
    if names_engines(arguments) == bool(arguments.url):
        raise ConfigurationError(
            "name either a running service by its URL, or engines (--worker, --endpoint, --engine)"
        )
    if find_spec("rich") is None:
        raise ConfigurationError(f"kvindex top needs the package rich: {how_to_install('server')}")
    live = sys.stdout.isatty()
    news = Waker()
    with ExitStack() as stack:
        stack.callback(news.close)
        if arguments.url:
            service = stack.enter_context(closing(ServiceFleet(arguments.url, arguments.cacert)))
            read = service.read
            if live:
                service.watch(news.wake)
        else:
            client = stack.enter_context(connect(engines_of(arguments)))

            def read() -> Fleet:
                discovery = client.discovery
                missing = None if discovery is None else discovery.missing()
                return overview(client.statistics(), missing=missing)

            if live:
                client.on_change(lambda _: news.wake())
            else:
                with suppress(NotLiveError):  # then it shows that
                    client.wait_live(arguments.wait)
        if not live:
            print_once(read(), sort=arguments.sort, most=arguments.ranks)
            return 0
        with suppress(KeyboardInterrupt):  # the normal end
            show(read, news, sort=arguments.sort, most=arguments.ranks, every=arguments.every)
    return 0


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


# The screen --------------------------------------------------------------------------------------


class View(msgspec.Struct):
    """How the table is to be shown; keys change it.

    Attributes:
        first: the rank at the top; the drawing keeps it within the fleet, and sets `page`.
        find: only ranks with this in their name, model or reason.
        finding: whether keys are part of what is to be found.
        why: whether reasons are shown in full, instead of the table.

    Owner: the thread that draws.
    """

    sort: str
    reverse: bool = False
    first: int = 0
    page: int = 1
    find: str = ""
    finding: bool = False
    why: bool = False
    ended: bool = False

    def press(self, key: str) -> None:
        """Do what a key stands for; others do nothing."""
        if self.finding:
            if key in ("\r", "\n", "\x1b"):
                self.finding = False
                self.find = "" if key == "\x1b" else self.find
            elif key in ("\x7f", "\b"):
                self.find = self.find[:-1]
            elif len(key) == 1 and key.isprintable():
                self.find += key
            return
        if key == "/":
            self.finding, self.find, self.first = True, "", 0
        elif key == "q":
            self.ended = True
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "w":
            self.why = not self.why
        elif key == "\x1b":
            self.find = ""
        else:
            self.first += _STEPS.get(key, 0) + _PAGES.get(key, 0) * self.page
        for sort, its_key in SORTS.items():
            if key == its_key:
                self.sort, self.reverse, self.first = sort, False, 0


def drawn(
    fleet: Fleet | None, view: View, *, most: int, trouble: str = "", once: bool = False
) -> Group:
    """Return what is shown of a fleet, at most so many ranks; `once` for what is not drawn again.

    `trouble` is why the fleet could not be read just now; without a fleet there is nothing else.
    """
    parts: list[Text | Table] = []
    if trouble:
        parts.append(Text(printable(trouble), style="bold red"))
    if fleet is None:
        return Group(*parts)
    parts.append(Text(_totals_line(fleet.totals), style="bold"))
    ranks = [
        rank
        for rank in sorted_ranks(fleet.ranks, view.sort, reverse=view.reverse)
        if view.find.lower() in f"{rank.worker}/{rank.dp_rank} {rank.model} {rank.reason}".lower()
    ]
    why = _reasons(fleet, ranks)
    if view.why:
        parts += [Text(line) for line in why[:most]] or [Text("nothing is wrong")]
    else:
        view.first, view.page = max(0, min(view.first, len(ranks) - most)), most
        shown = ranks[view.first : view.first + most]
        parts.append(_grid(shown))
        if len(ranks) > len(shown):
            place = f"ranks {view.first + 1}-{view.first + len(shown)} of {len(ranks)}"
            parts.append(Text(place, "bright_black"))
        for line in why if once else why[:_REASONS]:
            parts.append(Text(line, "bright_black", no_wrap=True, overflow="ellipsis"))
    if not once:
        parts.append(_help(view))
    return Group(*parts)


def print_once(fleet: Fleet, *, sort: str, most: int | None) -> None:
    """Print a fleet for a program or a file: all ranks, or `most` of them."""
    most = max(1, len(fleet.ranks)) if most is None else most
    Console(width=_WIDE).print(drawn(fleet, View(sort), most=most, once=True))


def sorted_ranks(
    ranks: Sequence[RankView], sort: str = "state", *, reverse: bool = False
) -> list[RankView]:
    """Return ranks with the worst, most or longest first; by name, from the beginning."""
    # Sorting is stable: equal ranks stay in the order of their names.
    ordered = sorted(ranks, key=lambda rank: (rank.worker, rank.dp_rank))
    if sort != "name":
        ordered.sort(key=_KEYS[sort], reverse=True)
    return ordered[::-1] if reverse else ordered


def _totals_line(totals: Totals) -> str:
    """Return the sums in one line."""
    states = ", ".join(f"{number} {state}" for state, number in totals.states.items())
    media = ", ".join(f"{number:,} {medium}" for medium, number in sorted(totals.blocks.items()))
    return printable(
        f"{counted(totals.ranks, 'rank')} of {counted(totals.workers, 'worker')}: "
        f"{states or 'none live'}, {totals.complete} complete; "
        f"{media or '0'} blocks; lag {totals.lag}; "
        f"{counted(totals.gaps, 'gap')}, {counted(totals.losses, 'loss', 'losses')}, "
        f"{counted(totals.restarts, 'restart')}"
    )


def _reasons(fleet: Fleet, ranks: Iterable[RankView]) -> list[str]:
    """Return a line for each engine that was not found, and for each reason of some ranks."""
    missing = [f"not found: {name}: {why}" for name, why in fleet.missing.items()]
    lines = missing[:_MOST_MISSING]
    if len(missing) > len(lines):
        lines.append(f"not found: {len(missing) - len(lines)} more")
    groups: dict[str, list[RankView]] = {}
    for rank in ranks:
        # Reasons that differ in numbers and in the rank's own addresses only are the same: a fleet
        # that is unreachable has one.
        if rank.reason:
            common = rank.reason.replace(rank.endpoint, "").replace(
                rank.replay_endpoint or "\0", ""
            )
            groups.setdefault(re.sub(r"\d+", "#", common), []).append(rank)
    for first, *others in groups.values():
        more = f" and {counted(len(others), 'more rank')}" if others else ""
        lines.append(f"{first.worker}/{first.dp_rank}{more}: {in_options(first.reason)}")
    return [printable(line) for line in lines]


def _grid(ranks: list[RankView]) -> Table:
    grid = Table(box=None, header_style="bright_black", pad_edge=False)
    for name in _HEADER:
        grid.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for rank in ranks:
        media = ", ".join(f"{number} {medium}" for medium, number in sorted(rank.blocks.items()))
        row = (
            f"{rank.worker}/{rank.dp_rank}",
            rank.model or "-",
            rank.state,
            "yes" if rank.complete else "no",
            rank.lag,
            "-" if rank.last_event_age is None else f"{rank.last_event_age:.0f}",
            media or "-",
            rank.gaps,
            rank.losses,
            rank.restarts,
        )
        # Text, never markup, and nothing that steers a terminal: names are from the network.
        cells = [Text(printable(str(cell))) for cell in row]
        cells[2].stylize(_COLOURS.get(rank.state, ""))
        cells[3].stylize("" if rank.complete else "yellow")
        grid.add_row(*cells)
    return grid


def _help(view: View) -> Text:
    if view.finding:
        return Text(printable(f"find: {view.find}_   Enter keeps it, Escape clears it"))
    keys = "  ".join(f"{key} {sort}" for sort, key in SORTS.items())
    order = " reversed" if view.reverse else ""
    only = f", with {view.find!r}" if view.find else ""
    text = (
        f"sorted by {view.sort}{order}{only}   {keys}  r reverse  ↑↓ scroll  / find  w why  q quit"
    )
    return Text(printable(text), "bright_black")


def show(
    read: Callable[[], Fleet], news: Waker, *, sort: str, most: int | None, every: float
) -> None:
    """Draw a fleet again and again, after news or so many seconds, until q is pressed.

    An error of `read` is shown, and the fleet is read again.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    console = Console()
    view = View(sort)
    fleet: Fleet | None = None
    with _keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        while not view.ended:
            trouble = ""
            # Before reading: news that come meanwhile are for the next turn.
            news.clear()
            try:
                fleet = read()
            except KVIndexError as error:
                trouble = str(error)
            room = max(1, console.height - _FRAME - _REASONS)
            live.update(
                drawn(fleet, view, most=min(room, most or room), trouble=trouble), refresh=True
            )
            ready, _, _ = select.select([news.fileno(), *keyboard], [], [], every)
            for descriptor in set(keyboard).intersection(ready):
                # The bytes of an arrow come at once: a lone Escape is a key of its own.
                typed = os.read(descriptor, 64).decode(errors="ignore")
                for key in [_SEQUENCES[typed]] if typed in _SEQUENCES else typed:
                    view.press(key)
                if not typed:
                    keyboard.clear()  # the terminal has gone


@contextmanager
def _keyboard() -> Iterator[list[int]]:
    """Return the descriptor that shows each key at once; none where stdin is no terminal."""
    if not sys.stdin.isatty():
        yield []
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    # Each key at once, and Ctrl-C still interrupts.
    tty.setcbreak(descriptor)
    try:
        yield [descriptor]
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
