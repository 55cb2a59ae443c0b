"""`kvindex audit` of recordings, and what it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvindex import EventBatch
from kvindex.testing import FakeEngine
from kvindex.wire import RecordingWriter, encode_batch, live_frames
from tests.tools.commands import Run

pytestmark = pytest.mark.unit

CAPTURES = Path(__file__).parents[2] / "data" / "captures"
PROMPT = list(range(64))


@pytest.fixture
def recordings(tmp_path: Path) -> list[str]:
    """Two engines that got the same prompts in turn: each computed all of them."""
    paths = []
    for number in range(2):
        engine = FakeEngine(f"vllm-{number}", num_blocks=10, publish=False)
        path = tmp_path / f"{engine.worker}.frames"
        with path.open("wb") as file:
            writer = RecordingWriter(file)
            for seq in range(20):
                prompt = [seq % 4 * 1000 + token for token in PROMPT]
                engine.serve(prompt)
                batch = EventBatch(100.0 + 2 * seq + number, list(engine.events), 0)
                writer.write("live", live_frames(b"", seq, encode_batch(batch)))
        paths.append(str(path))
    return paths


def test_recordings_are_merged_by_the_engines_clocks(recordings: list[str], run: Run) -> None:
    report = run("audit", "--json", *recordings).json
    ranks = {rank["rank"]: rank["tokens"] for rank in report["ranks"]}
    assert report["tokens"]["computed"] == 2 * 20 * 64
    assert ranks["vllm-1/0"]["elsewhere"] == 20 * 64  # the first engine had each just before
    assert ranks["vllm-0/0"]["evicted"] == 16 * 64
    assert report["seconds"] == 39.0
    assert sum(bucket["computed"] for bucket in report["series"]) == 2 * 20 * 64


def test_the_text_begins_with_the_three_figures(recordings: list[str], run: Run) -> None:
    out = run("audit", *recordings).out
    figures = re.findall(r"^What (\w+ ?\w*) costs?: [\d.]+ %$", out, re.MULTILINE)
    assert figures == ["routing", "small caches", "duplication"]
    assert "What the figures do not cover" in out
    tables = ["Who held the computed tokens", "Ranks", "Most shared prefixes"]
    lines = out.splitlines()
    assert [line for line in lines if line in (*tables, "Computed tokens over time")] == tables
    assert "Blocks that left were held for up to" in out


def test_the_page_is_well_formed_and_whole(recordings: list[str], tmp_path: Path, run: Run) -> None:
    odd = tmp_path / "<b>&.frames"
    odd.write_bytes(Path(recordings[0]).read_bytes())
    page = tmp_path / "report.html"
    run("audit", odd, *recordings, "--html", page)
    text = page.read_text("utf-8")
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;/0" in text
    assert not re.search(r"<script|https?:|src=|@import|url\(", text)
    body = text[text.index("<main>") : text.index("</main>")] + "</main>"
    main_part = ElementTree.fromstring(body)
    plots = list(main_part.iter("svg"))
    assert len(plots) == 7
    ids = [element.get("id") for element in main_part.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    for plot in plots:
        assert plot.get("role") == "img"
        labels = (plot.get("aria-labelledby") or "").split()
        assert labels
        assert set(labels) <= set(ids)
        assert plot.find("title") is not None


def test_the_page_bears_a_time_that_is_none(tmp_path: Path, run: Run) -> None:
    recording, page = tmp_path / "odd.frames", tmp_path / "report.html"
    with recording.open("wb") as file:
        batch = encode_batch(EventBatch(1e300, [], 0))
        RecordingWriter(file).write("live", live_frames(b"", 0, batch))
    run("audit", recording, "--html", page)
    assert "from 1e+300 s" in page.read_text("utf-8")


def test_tokens_can_be_left_out(recordings: list[str], run: Run) -> None:
    shared = run("audit", "--json", "--no-tokens", *recordings).json["shared"]
    assert {tuple(prefix["first_tokens"]) for prefix in shared} == {()}


def test_a_cut_off_recording_is_reported_as_far_as_it_goes(recordings: list[str], run: Run) -> None:
    whole = Path(recordings[0]).read_bytes()
    Path(recordings[0]).write_bytes(whole[:-5])
    assert run("audit", "--json", *recordings, code=1).json["tokens"]["computed"] > 0


@pytest.mark.parametrize("path", sorted(CAPTURES.glob("vllm-0.[23]*.frames")), ids=lambda p: p.stem)
def test_what_real_engines_hold_at_the_end_is_what_the_audit_reports(path: Path, run: Run) -> None:
    mode = ["--report-mode", "full"] if path.stem.endswith("full") else []
    report = run("audit", "--json", "--with-replayed", *mode, path).json
    truth = json.loads(path.with_suffix(".json").read_text())
    size = truth["block_size"]
    held = {block["hash"] for block in truth["cached"] if not block["group"]}
    assert report["duplication"]["unique"] == len(held) * size
    assert report["tokens"]["unknown"] == 0
