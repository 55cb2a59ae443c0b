"""Questions to an index in every form that tokens may have, and all that an index shows."""

from __future__ import annotations

import ctypes
from array import array
from collections import Counter, UserList
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from hypothesis import strategies as st

from kvindex import Rank
from kvindex.index.api import BaseIndex
from tests.index.index_steps import EXTRAS, RANKS, TEXTS, Call, Drawn, Sent, usually

SEED = 7


class Query(NamedTuple):
    """A question in one of the forms that tokens may have."""

    text: int
    length: int
    form: str
    options: dict[str, Any]

    def tokens(self) -> Any:
        text = TEXTS[self.text]
        tokens = list(text if len(text) > 100 else text[: self.length])
        try:
            return FORMS[self.form](tokens)
        except (OverflowError, ValueError):  # tokens that this form has no room for
            return tuple(tokens)


def _numpy(kind: str) -> Callable[[list[int]], Any]:
    try:
        import numpy
    except ImportError:
        return lambda tokens: tuple(tokens)
    return lambda tokens: numpy.array(tokens, dtype=kind)


def _view(code: str, tokens: list[int]) -> Any:
    return memoryview(array(code, tokens))


def _in_c(kind: Any, tokens: list[int]) -> Any:
    if tokens != [kind(token).value for token in tokens]:
        raise OverflowError
    return (kind * len(tokens))(*tokens)


def _range(tokens: list[int]) -> Any:
    if tokens != list(range(len(tokens))):
        raise ValueError("no range")
    return range(len(tokens))


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "range": _range,
    **{f"array {code}": partial(array, code) for code in "iIlLqQ"},
    "sequence": UserList,
    "view of bytes": lambda tokens: memoryview(array("I", tokens).tobytes()).cast("I"),
    "view of a bytearray": lambda tokens: memoryview(bytearray(array("I", tokens))).cast("I"),
    **{f"view {code}": partial(_view, code) for code in "iq"},
    "read-only": lambda tokens: memoryview(array("i", tokens)).toreadonly(),
    **{
        f"ctypes {kind.__name__}": partial(_in_c, kind)
        for kind in (ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_uint64)
    },
    "unaligned": lambda tokens: memoryview(b"." + array("q", tokens).tobytes())[1:].cast("q"),
    **{f"numpy {kind}": _numpy(kind) for kind in ("int32", "uint32", "int64", "uint64")},
}


def about(drawn: Drawn, block_size: int) -> Query:
    """The prompt that an event is about."""
    options = {
        "lora": drawn.lora[0] or drawn.lora[1],
        "salt": drawn.salt,
        "extra_keys": None if drawn.extras is None else drawn.keys(range(13)),
        "block_size": drawn.odd_size or block_size,
    }
    return Query(drawn.text, len(drawn.tokens), "list", options)


def asked_about(step: Sent | Call) -> list[Query]:
    """The prompts that a step is about."""
    events = step.drawn if isinstance(step, Sent) else []
    return [about(event, RANKS[step.rank]) for event in events]


SWEEP = [
    Query(text, 13, "list", options)
    for text in range(len(TEXTS))
    for options in ({}, {"lora": "lora"})
]


def counted(index: BaseIndex) -> dict[str, Any]:
    """The statistics without the number of runs, which shows how the tree is kept."""
    statistics = index.statistics()
    del statistics["runs"]
    return statistics


def held(index: BaseIndex) -> dict[Rank, tuple[int, Counter[Any]]]:
    trees = {rank: index.tree(rank) for rank in index.ranks}
    return {rank: (len(tree), Counter(tree.walk())) for rank, tree in trees.items()}


limits = st.fixed_dictionaries(
    {},
    optional={
        "max_blocks": st.sampled_from([None, None, 1, 3, 8, 20]),
        "max_orphans": st.sampled_from([16_384, 16_384, 0, 1, 3]),
    },
)
options = st.fixed_dictionaries(
    {},
    optional={
        "lora": usually(None, "lora", 7, "", 0, -5),
        "salt": usually(None, "salt"),
        "extra_keys": usually(
            None, [("image", 3)], [None, EXTRAS[1], ["lora", ("image", 3)], EXTRAS[3]], [EXTRAS[4]]
        ),
        "media": st.sampled_from([None, "gpu", ["CPU", "GPU"], ["cuda:0"], []]),
        "ranks": st.none() | st.lists(st.sampled_from(list(RANKS)), max_size=3),
        "block_size": st.sampled_from([None, 1, 2, 3, 300, 2**40]),
        "recomputed": st.sampled_from([0, 1, 1, 2, 4, 13, 2**70]),
    },
)
queries = st.builds(
    Query,
    text=st.integers(0, len(TEXTS) - 1),
    length=st.sampled_from([13, 13, *range(14)]),
    form=st.sampled_from(list(FORMS)),
    options=st.just({}) | options,
)
