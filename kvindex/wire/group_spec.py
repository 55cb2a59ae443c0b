"""What kind of attention a KV cache group of a hybrid model serves."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvindex.errors import ConfigurationError

__all__ = ["GroupSpec", "group_specs"]

_WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
_NO_PREFIX_KINDS = frozenset({"encoder_only_attention", "cross_attention"})


class GroupSpec(msgspec.Struct, frozen=True):
    """What kind of attention a KV cache group serves.

    Attributes:
        kind: vLLM's `kv_cache_spec_kind`; unknown kinds are treated like
            "full_attention", which never overestimates.
        sliding_window: the window in tokens, for the sliding-window kinds.

    Raises:
        ConfigurationError: a sliding-window kind without a positive window.
    """

    kind: str = "full_attention"
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.kind in _WINDOW_KINDS and (self.sliding_window or 0) < 1:
            raise ConfigurationError(
                f"a {self.kind} group needs sliding_window >= 1 token, not {self.sliding_window}"
            )

    @property
    def takes_part(self) -> bool:
        """Whether prefix caching concerns the group at all."""
        return self.kind not in _NO_PREFIX_KINDS

    def needed_blocks(self, block_size: int) -> int | None:
        """Return how many blocks before the cut must be resident; None means all of them."""
        if self.kind in _WINDOW_KINDS:
            assert self.sliding_window is not None
            return -(-(self.sliding_window - 1) // block_size)
        if self.kind == "mamba":
            return 1  # the state at the cut stands for everything before it
        return None


def group_specs(specs: Mapping[int, GroupSpec]) -> dict[int, GroupSpec]:
    """Return a checked copy of a caller's group table."""
    for group_idx, spec in specs.items():
        if group_idx < 0 or not isinstance(spec, GroupSpec):
            raise ConfigurationError(
                f"groups must map group_idx >= 0 to GroupSpec, not {group_idx!r} to {spec!r}"
            )
    return dict(specs)
