"""Encodes text piece by piece between special tokens, and remembers the pieces.

A chat is encoded again at each turn, and only its last messages are new. Special tokens end
whatever a tokenizer looks at, so the pieces between them can be encoded by themselves. Tokenizers
whose normalizer treats the beginning of a text in its own way are an exception: `Segments` compares
itself with the whole encoding, and is switched off where they differ.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any, Final

logger = logging.getLogger(__name__)

_MOST_CHARACTERS: Final = 64 << 20  # of the pieces that are remembered
_CHECK_EVERY: Final = 1_000  # texts
# What tokenizers are known to treat in their own ways where a text begins or ends.
_EDGES: Final = ("a", " a", "a ", "\n\na", "  \n", "'s", "é", "\u4f60\u597d", "1234", "\u2581a")


class Segments:
    """One tokenizer with the pieces that it has encoded.

    Args:
        tokenizer: a `tokenizers.Tokenizer`; from here on it neither truncates nor pads.
        name: for messages.

    Attributes:
        is_on: whether texts are encoded by pieces; else as a whole.

    Thread-safe. Complexity: O(characters), of which those of new pieces count about a hundred
    times; 64 Mi characters are remembered at most, the last used ones.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.is_on = False
        self._tokenizer = tokenizer
        self._name = name
        self._ids = _special_tokens(tokenizer)
        # Where two begin at one place the longer one counts, as in the tokenizer.
        longest = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest))})")
        self._pieces: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0
        self._counters: Counter[str] = Counter()
        self._lock = Lock()
        if self._ids:
            self.is_on = True
            for special in longest[:16]:
                self._check("".join(f"{special}{edge}" for edge in _EDGES) + special)

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of a text in which special tokens may stand; none are added."""
        with self._lock:
            self._counters["texts"] += 1
            is_due = self._counters["texts"] % _CHECK_EVERY == 0
        if not self.is_on:
            return self._whole(text)
        return self._check(text) if is_due else self._by_pieces(text)

    def new_characters(self, text: str) -> int:
        """Return how much of a text is not remembered: what it costs to encode it."""
        if not self.is_on:
            return len(text)
        pieces = self._pattern.split(text)[::2]
        return sum(len(piece) for piece in pieces if piece not in self._pieces)

    def statistics(self) -> dict[str, Any]:
        """Return counters: `texts`, `checked` and `differing` ones; `pieces`, `remembered` ones."""
        counted = {name: self._counters[name] for name in _COUNTERS}
        return {**counted, "is_on": self.is_on, "characters": self._characters}

    def _whole(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _by_pieces(self, text: str) -> array[int]:
        found = array("I")
        remembered = 0
        split = self._pattern.split(text)
        for at, piece in enumerate(split):
            if at % 2:
                found.append(self._ids[piece])
            elif piece:
                ids = self._remembered(piece)
                remembered += ids is not None
                found += self._encoded(piece) if ids is None else ids
        with self._lock:
            self._counters["pieces"] += (len(split) + 1) // 2
            self._counters["remembered"] += remembered
        return found

    def _check(self, text: str) -> Sequence[int]:
        """Encode a text in both ways; return its ids as a whole."""
        whole = self._whole(text)
        self._counters["checked"] += 1
        if self.is_on and list(self._by_pieces(text)) != whole:
            self.is_on = False
            self._counters["differing"] += 1
            logger.warning(
                "%s: its pieces between special tokens have other tokens than the whole text: "
                "from now on each prompt is encoded as a whole, which takes longer",
                self._name,
            )
            with self._lock:
                self._pieces.clear()
                self._characters = 0
        return whole

    def _remembered(self, piece: str) -> array[int] | None:
        with self._lock:
            ids = self._pieces.get(piece)
            if ids is not None:
                self._pieces.move_to_end(piece)
            return ids

    def _encoded(self, piece: str) -> array[int]:
        ids = array("I", self._whole(piece))
        with self._lock:
            if piece not in self._pieces and len(piece) <= _MOST_CHARACTERS:
                self._pieces[piece] = ids
                self._characters += len(piece)
            while self._characters > _MOST_CHARACTERS:
                oldest, _ = self._pieces.popitem(last=False)
                self._characters -= len(oldest)
        return ids


_COUNTERS: Final = ("texts", "pieces", "remembered", "checked", "differing")


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the tokens at which any text is split, wherever they stand, and their ids.

    Tokens that take the space beside them along, or are found only as a word of their own or after
    normalization, are left to the tokenizer.
    """
    return {
        token.content: number
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.content
        and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
    }
