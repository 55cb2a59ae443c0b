"""Kinds of KV cache groups, told by the user where the wire does not tell them."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from kvindex import CacheSettings, ConfigurationError, GroupSpec, Worker
from kvindex.tools.cli.arguments import group_of

pytestmark = pytest.mark.unit


def test_a_sliding_window_needs_its_width() -> None:
    assert GroupSpec("sliding_window", 64).needed_from(128, 16) == 64
    assert GroupSpec().needed_from(128, 16) == 0
    assert GroupSpec("mamba").needed_from(128, 16) == 112
    assert GroupSpec("chunked_local_attention", None, 48).needed_from(128, 16) == 96
    assert GroupSpec("chunked_local_attention").needs_all, "nobody told the size of chunks"
    with pytest.raises(ConfigurationError, match="sliding_window >= 1"):
        GroupSpec("sliding_window")


def test_a_worker_takes_the_settings_of_its_cache_and_refuses_others() -> None:
    cache = CacheSettings(groups={1: GroupSpec("sliding_window", 64)}, eagle=True)
    assert Worker("w", "tcp://h:1", cache=cache).cache is cache
    with pytest.raises(ConfigurationError, match="cache must be CacheSettings"):
        Worker("w", "tcp://h:1", cache={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": {-1: GroupSpec()}}, "group_idx"),
        ({"groups": {1: "mamba"}}, "GroupSpec"),
        ({"groups": [GroupSpec()]}, "list"),
        ({"report_mode": "partial"}, "report_mode"),
        ({"removals": "first"}, "removals"),
        ({"hash_block_size": 0}, "hash_block_size"),
        ({"offload_chunk": 0}, "offload_chunk"),
    ],
)
def test_settings_of_a_cache_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CacheSettings(**settings)
    with pytest.raises(ConfigurationError, match="attention_chunk_size"):
        GroupSpec("chunked_local_attention", attention_chunk_size=0)
    for tokens in (2**63, -(2**63) - 1):
        with pytest.raises(ConfigurationError, match=f"^{tokens} tokens .* exceed 64 bits"):
            GroupSpec(sliding_window=tokens)


def test_a_group_of_the_command_line() -> None:
    assert group_of("1=sliding_window:64") == (1, GroupSpec("sliding_window", 64))
    assert group_of("0=full_attention") == (0, GroupSpec())
    chunked = GroupSpec("chunked_local_attention", attention_chunk_size=8192)
    assert group_of("1=chunked_local_attention:8192") == (1, chunked)
    for text in ("1", "x=mamba", "1=sliding_window", "1=sliding_window:x", "1=sliding_window:0"):
        with pytest.raises(argparse.ArgumentTypeError, match="IDX=KIND"):
            group_of(text)
