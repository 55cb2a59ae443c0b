"""`kvindex top` as text: what is first, what is left out, and that nothing steers a terminal."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

pytest.importorskip("rich", reason="needs kvindex[server]")

from rich.console import Console

from kvindex import Rank, State
from kvindex.service.overview import Fleet, overview
from kvindex.tools.cli.top import SORTS, View, drawn, print_once, sorted_ranks
from tests.index.index_events import apply, stored
from tests.service.test_fleet_overview import Source, status_of
from tests.tools.commands import Run

pytestmark = pytest.mark.unit


def fleet_text(fleet: Fleet, sort: str = "state", most: int | None = None) -> str:
    """Return what a pipe gets."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_once(fleet, sort=sort, most=most)
    return out.getvalue()


@pytest.fixture
def fleet() -> Fleet:
    source = Source(
        status_of(Rank("a", 0), lag=1, last_event_age=90.0),
        status_of(Rank("a", 1), State.CONNECTING, reason="nothing listens", last_event_age=None),
        status_of(Rank("b", 0), complete=False, losses=2, gaps=1, restarts=3),
    )
    apply(source.index, Rank("a", 0), stored(0, 1))
    return overview(source.statistics())


def test_ranks_are_sorted_worst_most_or_longest_first(fleet: Fleet) -> None:
    first = {sort: sorted_ranks(fleet.ranks, sort)[0] for sort in SORTS}
    assert {sort: f"{rank.worker}/{rank.dp_rank}" for sort, rank in first.items()} == {
        "state": "a/1",
        "name": "a/0",
        "lag": "a/0",
        "age": "a/1",
        "blocks": "a/0",
        "gaps": "b/0",
        "losses": "b/0",
        "restarts": "b/0",
    }
    assert sorted_ranks(fleet.ranks, "name", reverse=True)[0].worker == "b"


def test_the_text_has_sums_a_row_for_each_rank_and_the_reasons(fleet: Fleet) -> None:
    lines = fleet_text(fleet).splitlines()
    assert lines[0] == (
        "3 ranks of 2 workers: 1 connecting, 2 live, 2 complete; 2 GPU blocks; lag 1; "
        "1 gap, 2 losses, 3 restarts"
    )
    assert lines[1].split()[:3] == ["rank", "model", "state"]
    assert "on" not in lines[1].split()
    assert [line.split()[0] for line in lines[2:5]] == ["a/1", "b/0", "a/0"]
    assert "2 GPU" in lines[4]
    assert lines[5] == "a/1: nothing listens"


def test_a_number_limits_the_rows_and_the_rest_is_counted(fleet: Fleet) -> None:
    text = fleet_text(fleet, sort="losses", most=1)
    assert "ranks 1-1 of 3" in text
    assert "a/0" not in text
    assert "a/1: nothing listens" in text


def test_names_and_reasons_cannot_steer_the_terminal() -> None:
    evil = status_of(Rank("a\x1b[2J", 0), State.STALE, reason="\x1b]0;owned\x07")
    text = fleet_text(overview(Source(evil).statistics()))
    assert "\x1b" not in text
    assert "\\x1b[2J" in text


@pytest.mark.parametrize("argv", [[], ["http://h:1", "--worker", "a=tcp://h:1"]])
def test_either_a_service_or_engines_are_named(argv: list[str], run: Run) -> None:
    assert "by its URL, or engines" in run("top", *argv, code=2).err


def test_a_reason_that_many_ranks_have_is_one_line_and_engines_that_were_not_found_are_named() -> (
    None
):
    views = [
        status_of(
            Rank("gone", n),
            State.CONNECTING,
            reason=f"nothing listens at tcp://h:{n} (failed attempts: {n})",
            endpoint=f"tcp://h:{n}",
        )
        for n in range(8)
    ]
    text = fleet_text(overview(Source(*views).statistics(), missing={"http://e:1": "refused"}))
    assert text.count("nothing listens") == 1
    assert "gone/0 and 7 more ranks: nothing listens at tcp://h:0" in text
    assert "not found: http://e:1: refused" in text


# What keys change --------------------------------------------------------------------------------


def drawing(fleet: Fleet, view: View, **options: Any) -> str:
    """Return what a terminal shows."""
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(drawn(fleet, view, most=10, **options))
    return out.getvalue()


def test_ranks_beyond_the_screen_are_scrolled_to_and_found_by_name() -> None:
    fleet = overview(Source(*(status_of(Rank(f"w{n:03}", 0)) for n in range(100))).statistics())
    view = View("name")
    for keys, shown in (
        ((), "ranks 1-10 of 100"),
        (("page down", "down"), "ranks 12-21 of 100"),
        (["page down"] * 20, "ranks 91-100 of 100"),
        ((*"/w04s", "\x7f"), "find: w04_"),
        (("\r",), "w049/0"),
    ):
        for key in keys:
            view.press(key)
            drawing(fleet, view)
        assert shown in drawing(fleet, view)
    assert "w050/0" not in drawing(fleet, view)
    view.press("\x1b")
    assert "of 100" in drawing(fleet, view)


def test_a_key_shows_all_reasons_in_full() -> None:
    why = "nothing listens at tcp://h:1, which is a long reason " + "in many words " * 20
    source = Source(status_of(Rank("gone", 1), State.CONNECTING, reason=why))
    fleet, view = (
        overview(source.statistics(), missing={"http://never:8000": "it answers 404"}),
        View("state"),
    )
    assert drawing(fleet, view).count("in many words") < 20
    view.press("w")
    text = drawing(fleet, view)
    assert " ".join(text.split()).count("in many words") == 20
    assert "not found: http://never:8000: it answers 404" in text


def test_keys_sort_reverse_and_end() -> None:
    view = View("state")
    for key in "bx":
        view.press(key)
    assert (view.sort, view.reverse, view.ended) == ("blocks", False, False)
    view.press("r")
    assert view.reverse
    view.press("q")
    assert view.ended


def test_what_is_drawn_has_no_markup_of_the_network_and_shows_what_is_wrong() -> None:
    evil = status_of(Rank("[red]a[/red]", 0), State.STALE, reason="[bold]why[/bold]")
    text = drawing(overview(Source(evil).statistics()), View("state"), trouble="no answer [x]")
    for literal in ("[red]a[/red]/0", "[bold]why[/bold]", "no answer [x]"):
        assert literal in text
