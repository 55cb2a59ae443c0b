"""What vLLM 0.33's whole scheduler sent, applied: no answer exceeds the scheduler's own."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, BinaryIO, cast

import pytest

from kvindex import CacheSettings, GroupSpec, Index, Rank, RankMatch
from kvindex.wire import parse_live, read_recording
from tests.captures import CAPTURES

pytestmark = pytest.mark.conformance

RECORDINGS = CAPTURES / "scheduler"
RANK = Rank("engine")
NAMES = sorted(path.name.split(".")[0] for path in RECORDINGS.glob("*.json.gz"))

# What no event tells of these.
SETTINGS = {
    "chunked": CacheSettings(
        groups={1: GroupSpec("chunked_local_attention", attention_chunk_size=64)}
    ),
    "hybrid-full": CacheSettings(report_mode="full"),
    "eagle": CacheSettings(eagle=True),
    "fine64": CacheSettings(hash_block_size=16),
}
# Some labels are never named by an event that tells their place: answers are lower then. So many
# of them are right.
PLACES_UNTOLD = {"fine64": (90, 100)}
TOLD = [name for name in NAMES if name not in PLACES_UNTOLD]
# Announcements that look like copies; an entry within a block, at which no hit ends.
COPIES_UNTOLD = ["hybrid-full", "bs64-16"]


@cache
def truth(name: str) -> dict[str, Any]:
    with gzip.open(RECORDINGS / f"{name}.json.gz") as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded


def payloads(name: str) -> Iterator[bytes]:
    with gzip.open(RECORDINGS / f"{name}.frames.gz", "rb") as file:
        for message in read_recording(cast(BinaryIO, file)):
            yield parse_live(message.frames).payload


@cache
def applied(name: str) -> Index:
    index = Index()
    index.configure(RANK, SETTINGS.get(name, CacheSettings()))
    for payload in payloads(name):
        index.apply(RANK, payload)
    index.check()
    return index


def answers(name: str, **options: Any) -> list[tuple[RankMatch, int]]:
    """Return what the index and the scheduler say to each probe."""
    both = []
    for probe in truth(name)["probes"]:
        about = {
            "lora": probe.get("lora"),
            "salt": probe.get("salt"),
            "extra_keys": probe.get("mm"),
        }
        if len({size for _, _, size in truth(name)["groups"]}) > 1 and about["extra_keys"]:
            continue  # extra keys are told block by block, and blocks differ in size
        pairs = applied(name).match(probe["tokens"][:-1], **about, **options)[RANK]
        both.append((pairs, probe["hit_tokens"]))
    return both


def test_all_recordings_are_here() -> None:
    assert len(NAMES) == 15


@pytest.mark.parametrize("name", TOLD)
def test_the_device_holds_for_each_probe_what_the_scheduler_would_hit(name: str) -> None:
    pairs = answers(name)
    assert [match.device_tokens for match, _ in pairs] == [hit for _, hit in pairs]
    if name != "offload-self-salt":
        assert {match.upper_bound for match, _ in pairs if match.tokens} == {name == "hybrid-full"}
    if (
        name != "bs64-16"
    ):  # no hit ends where its entries within blocks lie, but no event tells that
        assert not any(match.lower_bound for match, _ in pairs)


@pytest.mark.parametrize("name", PLACES_UNTOLD)
def test_blocks_whose_place_is_never_told_make_answers_low_and_never_high(name: str) -> None:
    pairs = answers(name)
    assert all(match.device_tokens <= hit for match, hit in pairs)
    right = sum(match.device_tokens == hit for match, hit in pairs)
    assert (right, len(pairs)) == PLACES_UNTOLD[name]
    assert all(match.lower_bound for match, _ in pairs)
    assert applied(name).statistics()["orphans"] > 0, "blocks without a place are counted"


@pytest.mark.parametrize("name", [name for name in TOLD if name not in COPIES_UNTOLD])
def test_every_copy_on_the_device_is_the_schedulers(name: str) -> None:
    expected = {(block["hash"], block["group"]): block["copies"] for block in truth(name)["cached"]}
    held: Counter[Any] = Counter()
    for block in applied(name).tree(RANK).walk():
        if block.medium == "GPU":
            held[block.block_hash, block.group_idx] += block.copies
    assert held == expected
    assert applied(name).statistics()["orphans"] == 0


def test_offloaded_blocks_are_the_connectors_and_prefixes_go_on_there() -> None:
    name = "offload-self-salt"
    on_host = {b.block_hash for b in applied(name).tree(RANK).walk() if b.medium == "CPU"}
    assert on_host == set(truth(name)["cpu"])
    longer = [match for match, hit in answers(name) if match.tokens > hit]
    assert len(longer) == 6
    assert all(match.upper_bound and match.by_medium["CPU"] for match in longer)
    on_device = answers(name, media="GPU")
    assert [match.tokens for match, _ in on_device] == [hit for _, hit in on_device]


def test_without_their_size_chunks_count_as_full_attention_and_never_too_high() -> None:
    index = Index()
    for payload in payloads("chunked"):
        index.apply(RANK, payload)
    for probe in truth("chunked")["probes"]:
        assert index.match(probe["tokens"][:-1])[RANK].tokens <= probe["hit_tokens"]
