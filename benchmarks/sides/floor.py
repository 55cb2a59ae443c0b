"""The floor under a match: reading the tokens, and hashing them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import kvindex
from benchmarks.sides.matching import timed, typed
from benchmarks.workload import BLOCK_SIZE, EVERYWHERE, Fleet

REPEATS = 1_000


class Floor:
    """The native core's `floor_…` functions, if it has been built.

    `floor_convert(tokens)` reads a list or a buffer as the core does; `floor_hash(tokens,
    block_size)` reads it and computes every block's prefix key. Neither touches the tree.
    """

    def measure(self, repeats: int = REPEATS) -> dict[str, list[int]]:
        """Return the nanoseconds of each, by name; empty without the native core."""
        native = _native()
        if native is None:
            return {}
        prompt = Fleet(1, seed=0).prompt(EVERYWHERE)
        found: dict[str, list[int]] = {}
        for form in ("list", "numpy"):
            tokens = typed(prompt, form)
            for name, call in _calls(native).items():
                found[f"{name}, {form}"] = timed(call, [tokens], repeats)
        return found


def _native() -> ModuleType | None:
    return importlib.import_module("kvindex.wire._native") if kvindex.BACKEND == "native" else None


def _calls(native: ModuleType) -> dict[str, Callable[[Any], Any]]:
    calls: dict[str, Callable[[Any], Any]] = {}
    if hasattr(native, "floor_convert"):
        calls["read the tokens"] = native.floor_convert
    if hasattr(native, "floor_hash"):
        hash_all = native.floor_hash
        calls["read and hash them"] = lambda tokens: hash_all(tokens, BLOCK_SIZE)
    return calls
