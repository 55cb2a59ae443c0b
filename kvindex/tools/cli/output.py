"""How commands write: tables, JSON, ranks that change; colours and progress for terminals only."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

from kvindex import BACKEND, Rank, RankStatus, State, __version__
from kvindex.wire.backend import SLOWER, explain_fallback

# What the library calls its own arguments, and how they are written here.
_OPTIONS = {
    "Worker(bind=True)": "--bind",
    "or bind=True": "or --bind",
    "check replay= (": "check --replay-endpoint (",
}

Colour: TypeAlias = Literal["red", "green", "yellow", "bold"]

_CODES: Final[dict[Colour, int]] = {"bold": 1, "red": 31, "green": 32, "yellow": 33}
_PATIENCE = 3.0  # seconds for ranks to become live before those that are not are named
_NUMBER = str.maketrans("", "", "0123456789.,-%")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return lines with aligned columns: numbers to the right, words to the left.

    Examples:
        >>> print(table(["rank", "tokens", "whole"], [["a/0", 96, True], ["a/1", None, False]]))
        rank  tokens  whole
        a/0       96  yes
        a/1        -  no
    """
    cells = [[printable(_cell(value)) for value in row] for row in rows]
    columns = list(zip(header, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(not cell.translate(_NUMBER) for cell in column[1:]) for column in columns]
    lines = []
    for row in [header, *cells]:
        aligned = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def painted(text: str, colour: Colour | None) -> str:
    """Return text in a colour if stdout is a terminal and neither NO_COLOR nor TERM forbids it."""
    plain_terminal = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if colour is None or plain_terminal or not sys.stdout.isatty():
        return text
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


def printable(text: str) -> str:
    r"""Return text that cannot steer a terminal: names are from the network.

    Examples:
        >>> printable("GPU"), printable("a\x1b[2J")
        ('GPU', 'a\\x1b[2J')
    """
    if text.isprintable():
        return text
    # An escape sequence could rewrite the screen, or the terminal's title.
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )


def in_options(text: str) -> str:
    """Return the library's text with this program's options instead of its own arguments.

    Examples:
        >>> in_options("give its host, or bind=True")
        'give its host, or --bind'
    """
    for argument, option in _OPTIONS.items():
        text = text.replace(argument, option)
    return text


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun.

    Examples:
        >>> counted(1, "rank"), counted(2, "rank"), counted(2, "reply", "replies")
        ('1 rank', '2 ranks', '2 replies')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def plain(value: Any) -> Any:
    """Return JSON-ready values: structs as objects, bytes in hex, ranks by their name."""
    if isinstance(value, Rank):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, msgspec.Struct):
        fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        tag = value.__struct_config__.tag
        return {"type": tag, **fields} if tag else fields
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def json_line(value: Any) -> str:
    """Return a value, made plain, as one line of JSON."""
    return json.dumps(plain(value))


def version_text() -> str:
    """Return the version, which index runs, and why if it is the slower one unrequested."""
    why = explain_fallback(os.environ.get("KVINDEX_BACKEND"))
    return f"kvindex {__version__}, {BACKEND} index" + (f", {SLOWER}: {why}" if why else "")


class Progress:
    """One line on stderr that is overwritten, at most ten times a second; silent off a terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._next = 0.0
        self._width = 0

    def show(self, text: str) -> None:
        """Show how far it is."""
        now = time.monotonic()
        # A terminal over a slow line would hold up the work.
        if self._shown and now >= self._next:
            self._next = now + 0.1
            print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def clear(self) -> None:
        """Wipe the line, so that what follows starts on an empty one."""
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)
            self._width = 0


class StateChanges:
    """Reports on stderr when a rank becomes live or stops being live, and why.

    That a rank is live for the first time is reported only if `first_live`.
    """

    def __init__(
        self, statuses: Callable[[], Mapping[Rank, RankStatus]], *, first_live: bool = False
    ) -> None:
        self._statuses = statuses
        self._patient_until = time.monotonic() + _PATIENCE
        self._reported: dict[Rank, State | None] = {}
        self._unknown = None if first_live else State.LIVE

    def report(self) -> None:
        """Report what has changed since the last call."""
        patient = time.monotonic() < self._patient_until
        for rank, status in self._statuses().items():
            is_live = status.state is State.LIVE
            # Every rank begins by connecting: for some seconds that is no news.
            if self._reported.get(rank, self._unknown) is status.state or (
                patient and not is_live and rank not in self._reported
            ):
                continue
            self._reported[rank] = status.state
            why = "" if is_live else f": {in_options(status.reason)}"
            print(printable(f"{rank}: {status.state}{why}"), file=sys.stderr, flush=True)
