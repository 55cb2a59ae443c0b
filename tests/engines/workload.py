"""What clients ask of an engine: chats that go on, tenants, single prompts, repeats."""

from __future__ import annotations

import random
from typing import Any

from tests.engines.make_model import VOCABULARY
from tests.engines.vllm import LONGEST

_ROOM = 100  # tokens that are left for answers

Messages = list[dict[str, str]]


class Request:
    """One request, and the conversation that its answer goes on with.

    Attributes:
        body: what to send, with `prompt` (token ids) or `messages`.
        salt: the tenant's `cache_salt`, if any.
    """

    def __init__(self, body: dict[str, Any], history: list[Any] | None = None) -> None:
        self.body = body
        self.salt: str | None = body.get("cache_salt")
        self._history = history

    def go_on(self, answer: dict[str, Any]) -> None:
        """Append the engine's answer to the conversation."""
        if self._history is None:
            return
        choice = answer["choices"][0]
        if "messages" in self.body:
            content = choice["message"]["content"] or "nothing"
            self._history.append({"role": "assistant", "content": content})
        else:
            self._history += choice["token_ids"]


class Workload:
    """Requests that share system prompts, in more tokens than a cache of 200 blocks holds.

    Args:
        seed: of everything that is chosen at random.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._systems = [self.tokens(length) for length in (40, 97, 160, 320)]
        self._words = [self._rng.choice("abcdefgh") * n for n in range(2, 8) for _ in range(2)]
        self._system_texts = [self._text(length) for length in (30, 80)]
        self._chats: list[tuple[list[int], str | None]] = []
        self._texts: list[Messages] = []

    def tokens(self, count: int) -> list[int]:
        """Return so many random token ids, none of them special."""
        return [self._rng.randrange(10, VOCABULARY) for _ in range(count)]

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choice(self._words) for _ in range(words))

    def next(self, *, text: bool = True) -> Request:
        """Return a request; without `text`, one whose tokens are known beforehand."""
        kinds = ["chat", "salted", "single", "repeated", "short", "text"]
        weights = [45, 12, 12, 14, 4, 13 if text else 0]
        kind = self._rng.choices(kinds, weights)[0]
        body: dict[str, Any] = {
            "max_tokens": self._rng.choice([1, 1, 4, 16, 40]),
            "temperature": 0.0,
            "ignore_eos": True,
        }
        if kind == "text":
            messages = self._messages()
            return Request(body | {"messages": list(messages)}, messages)
        body["return_token_ids"] = True
        if kind == "single":
            return Request(body | {"prompt": self.tokens(self._rng.randint(100, LONGEST - _ROOM))})
        if kind == "short":
            return Request(body | {"prompt": self.tokens(self._rng.randint(1, 40))})
        if kind == "repeated" and self._chats:
            token_ids, salt = self._rng.choice(self._chats)
            return Request(_salted(body | {"prompt": list(token_ids)}, salt))
        salt = f"tenant-{self._rng.randrange(3)}" if kind == "salted" else None
        token_ids = self._chat(salt)
        return Request(_salted(body | {"prompt": list(token_ids)}, salt), token_ids)

    def _chat(self, salt: str | None) -> list[int]:
        """Return a conversation of this tenant with a new turn."""
        open_ones = [chat for chat, its_salt in self._chats if its_salt == salt]
        if open_ones and self._rng.random() < 0.7:
            chat = self._rng.choice(open_ones)
        else:
            chat = list(self._rng.choice(self._systems))
            self._chats = [*self._chats[-12:], (chat, salt)]
        chat += self.tokens(self._rng.choice([5, 20, 60, 128]))
        if len(chat) > LONGEST - 2 * _ROOM:
            self._chats = [other for other in self._chats if other[0] is not chat]
            del chat[LONGEST - 2 * _ROOM :]
        return chat

    def _messages(self) -> Messages:
        if self._texts and self._rng.random() < 0.6:
            messages = self._rng.choice(self._texts)
        else:
            messages = [{"role": "system", "content": self._rng.choice(self._system_texts)}]
            self._texts = [*self._texts[-8:], messages]
        if len(messages) >= 6:
            self._texts = [other for other in self._texts if other is not messages]
        messages.append({"role": "user", "content": self._text(self._rng.randint(3, 40))})
        return messages


def _salted(body: dict[str, Any], salt: str | None) -> dict[str, Any]:
    return body if salt is None else body | {"cache_salt": salt}
