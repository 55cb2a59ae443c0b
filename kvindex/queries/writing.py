"""An answer's JSON for all instances at once, from columns of what their ranks hold.

What each dialect looks like stands here; native/core/answer_writer.cpp is the twin that is used
where the native module was built.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

__all__ = ["AnswerDialect", "PythonWriter"]


class AnswerDialect(enum.IntEnum):
    """Who is answered; the native core has the same numbers."""

    DYNAMO = 0
    RFC = 1
    MOTOR = 2


class _Instance(NamedTuple):
    name: str
    rows: range


class _Columns(NamedTuple):
    device: array[int]
    host: array[int]
    tokens: array[int]
    block_size: array[int]

    def most(self, rows: range) -> tuple[int, int, int]:
        """Return the most that any of these ranks holds: on the device, with the host, in all."""
        device, host, tokens = (
            max(column[rows.start : rows.stop], default=0) for column in self[:3]
        )
        return max(device, 0), max(host, 0), max(tokens, 0)


class PythonWriter:
    """As the native `AnswerWriter`.

    Args:
        dialect: an `AnswerDialect`.
        tenant: a JSON string, for dialects whose answers are by tenant.
        instances: the name of each instance and the names of its ranks, all JSON strings. Rows
            follow each other by instance.
    """

    def __init__(self, dialect: int, tenant: str, instances: list[tuple[str, list[str]]]) -> None:
        self._dialect = AnswerDialect(dialect)
        self._tenant = tenant
        self._ranks = [rank for _, ranks in instances for rank in ranks]
        self._instances: list[_Instance] = []
        row = 0
        for name, ranks in instances:
            self._instances.append(_Instance(name, range(row, row + len(ranks))))
            row += len(ranks)

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
        shown = (
            f"{one.name}:{self._shown(columns, one.rows)}"
            f"{'' if trusts is None else trusts[at].decode()}}}"
            for at, one in enumerate(self._instances)
            if columns.most(one.rows)[2] > 0
        )
        if self._dialect is AnswerDialect.DYNAMO:
            text = (
                f'{{"scores":{self._scores(device)},"frequencies":[],"instances":{_braced(shown)}}}'
            )
        else:
            text = f"{{{self._tenant}:{_braced(shown)}}}"
        return text.encode()

    def _scores(self, device: array[int]) -> str:
        return _braced(
            f"{one.name}:{self._holders(one.rows, device, device.__getitem__)}"
            for one in self._instances
            if any(device[row] > 0 for row in one.rows)
        )

    def _shown(self, columns: _Columns, rows: range) -> str:
        """Return an instance's object without its end."""
        device, host, tokens = columns.most(rows)
        if self._dialect is AnswerDialect.DYNAMO:
            ranks = self._holders(rows, columns.tokens, columns.device.__getitem__)
            return (
                f'{{"longest_matched":{tokens},"gpu":{device},"dp":{ranks},'
                f'"cpu":{host},"disk":{tokens}'
            )
        if self._dialect is AnswerDialect.RFC:
            ranks = self._holders(rows, columns.tokens, columns.tokens.__getitem__)
            return (
                f'{{"longest_matched":{tokens},"GPU":{device},"DP":{ranks},'
                f'"CPU":{host},"DISK":{tokens}'
            )

        def blocks(row: int) -> str:
            size = max(columns.block_size[row], 1)
            npu, cpu, disk = (max(column[row], 0) // size for column in columns[:3])
            return (
                f'{{"matched_tokens":{columns.tokens[row]},"npu_blocks":{npu},'
                f'"cpu_blocks":{cpu - npu},"disk_blocks":{disk - cpu}}}'
            )

        return f'{{"longest_matched":{tokens},"DP":{self._holders(rows, columns.tokens, blocks)}'

    def _holders(self, rows: range, counted: array[int], value: Callable[[int], int | str]) -> str:
        """Return an object of those ranks of which this counts anything."""
        return _braced(f"{self._ranks[row]}:{value(row)}" for row in rows if counted[row] > 0)


def _braced(members: Iterable[str]) -> str:
    return f"{{{','.join(members)}}}"
