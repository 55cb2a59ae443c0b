"""Kinds of KV cache groups, told by the user where the wire does not tell them."""

from __future__ import annotations

import argparse

import pytest

from kvindex import ConfigurationError, GroupSpec, Worker
from kvindex.cli.arguments import group_of


def test_a_sliding_window_needs_its_width() -> None:
    assert GroupSpec("sliding_window", 64).needed_blocks(16) == 4
    assert GroupSpec().needed_blocks(16) is None
    with pytest.raises(ConfigurationError, match="sliding_window >= 1"):
        GroupSpec("sliding_window")


def test_a_worker_takes_its_groups_and_refuses_others() -> None:
    window = GroupSpec("sliding_window", 64)
    assert Worker("w", "tcp://h:1", groups={1: window}).groups == {1: window}
    with pytest.raises(ConfigurationError, match="group_idx"):
        Worker("w", "tcp://h:1", groups={-1: window})


def test_a_group_of_the_command_line() -> None:
    assert group_of("1=sliding_window:64") == (1, GroupSpec("sliding_window", 64))
    assert group_of("0=full_attention") == (0, GroupSpec())
    for text in ("1", "x=mamba", "1=sliding_window", "1=sliding_window:x", "1=sliding_window:0"):
        with pytest.raises(argparse.ArgumentTypeError, match="IDX=KIND"):
            group_of(text)
