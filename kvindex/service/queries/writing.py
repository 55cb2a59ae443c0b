"""An answer's JSON for all instances at once, from columns of what their ranks hold.

What each dialect looks like stands here; native/core/answer_writer.cpp writes the same bytes, where
the native module was built.
"""

from __future__ import annotations

import enum
import itertools
from array import array
from typing import Any, NamedTuple

import msgspec

__all__ = ["AnswerDialect", "PythonWriter"]


class AnswerDialect(enum.IntEnum):
    """Who is answered; the native core has the same numbers."""

    DYNAMO = 0
    RFC = 1
    MOTOR = 2


class _Columns(NamedTuple):
    device: array[int]
    host: array[int]
    tokens: array[int]
    block_size: array[int]


class PythonWriter:
    """As the native `AnswerWriter`, by msgspec: for where the native module was not built.

    Args:
        dialect: an `AnswerDialect`.
        tenant: a JSON string, for dialects whose answers are by tenant.
        instances: the name of each instance and the names of its ranks, all JSON strings. Rows
            follow each other by instance.
    """

    def __init__(self, dialect: int, tenant: str, instances: list[tuple[str, list[str]]]) -> None:
        self._dialect = AnswerDialect(dialect)
        self._tenant = _text(tenant)
        self._ranks = [_text(rank) for _, ranks in instances for rank in ranks]
        row = itertools.count()
        self._instances = [(_text(name), [next(row) for _ in ranks]) for name, ranks in instances]

    def write(
        self,
        device: array[int],
        host: array[int],
        tokens: array[int],
        block_size: array[int],
        trusts: tuple[bytes, ...] | None,
    ) -> bytes:
        """Return the answer; `trusts` is added to each instance's object, a comma first.

        Raises:
            ValueError: a column or `trusts` has not one value for each row or instance.
        """
        columns = _Columns(device, host, tokens, block_size)
        for name, column in zip(_Columns._fields, columns, strict=True):
            if len(column) != len(self._ranks):
                raise ValueError(f"{name} must be a column of {len(self._ranks)} numbers")
        if trusts is not None and len(trusts) != len(self._instances):
            raise ValueError("trusts must be a tuple with a text for each instance")
        scores: dict[str, dict[str, int]] = {}
        shown: dict[str, msgspec.Raw] = {}
        for at, (name, rows) in enumerate(self._instances):
            if any(device[row] > 0 for row in rows):
                scores[name] = {self._ranks[row]: device[row] for row in rows if device[row] > 0}
            if any(tokens[row] > 0 for row in rows):
                written = msgspec.json.encode(self._shown(columns, rows))
                trust = b"" if trusts is None else trusts[at]
                shown[name] = msgspec.Raw(written[:-1] + trust + b"}")
        if self._dialect is AnswerDialect.DYNAMO:
            return msgspec.json.encode({"scores": scores, "frequencies": [], "instances": shown})
        return msgspec.json.encode({self._tenant: shown})

    def _shown(self, columns: _Columns, rows: list[int]) -> dict[str, Any]:
        """Return what an instance's ranks hold."""
        device, host, tokens = (max(0, *(column[row] for row in rows)) for column in columns[:3])
        holders = {self._ranks[row]: row for row in rows if columns.tokens[row] > 0}
        if self._dialect is AnswerDialect.MOTOR:
            by_rank = {rank: _blocks(columns, row) for rank, row in holders.items()}
            return {"longest_matched": tokens, "DP": by_rank}
        is_rfc = self._dialect is AnswerDialect.RFC
        column = columns.tokens if is_rfc else columns.device
        names = ("GPU", "DP", "CPU", "DISK") if is_rfc else ("gpu", "dp", "cpu", "disk")
        held = (device, {rank: column[row] for rank, row in holders.items()}, host, tokens)
        return {"longest_matched": tokens, **dict(zip(names, held, strict=True))}


def _blocks(columns: _Columns, row: int) -> dict[str, int]:
    size = max(columns.block_size[row], 1)
    npu, cpu, disk = (max(column[row], 0) // size for column in columns[:3])
    return {
        "matched_tokens": columns.tokens[row],
        "npu_blocks": npu,
        "cpu_blocks": cpu - npu,
        "disk_blocks": disk - cpu,
    }


def _text(json_string: str) -> str:
    return msgspec.json.decode(json_string, type=str)
