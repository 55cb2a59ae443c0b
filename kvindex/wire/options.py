"""Keyword options that one function passes on to another."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any


def check_options(function: str, options: Mapping[str, Any], known: Any) -> None:
    """Raise TypeError in the name of the function that was called, not of one behind it.

    Args:
        function: its name.
        options: that it was given, as `**options`.
        known: a TypedDict of the options that there are.
    """
    for name in options:
        if name not in known.__annotations__:
            close = get_close_matches(name, known.__annotations__, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
