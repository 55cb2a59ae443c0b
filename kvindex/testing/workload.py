"""Requests as a serving fleet sees them, from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

from kvindex.wire.errors import ConfigurationError


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request to an engine.

    Attributes:
        token_ids: the prompt.
        new_tokens: what the engine generates.
        lora: LoRA adapter name.
        salt: cache salt.
    """

    token_ids: tuple[int, ...]
    new_tokens: tuple[int, ...] = ()
    lora: str | None = None
    salt: str | None = None


class _Conversation(msgspec.Struct):
    token_ids: tuple[int, ...]
    lora: str | None
    salt: str | None


class Workload:
    """Generate requests: multi-turn conversations over a few shared system prompts.

    Iterating again gives the same requests again. Lengths are not multiples of any block size,
    except for prompts sent again, of which some are cut to `align`.

    Args:
        requests: how many.
        seed: which ones.
        system_prompts: how many different beginnings.
        system_tokens: how long each is, in tokens.
        turn_tokens: longest user turn, in tokens; the shortest is 1.
        new_tokens: longest answer, in tokens.
        max_tokens: longest prompt and answer together; a conversation that reaches it ends.
        resend: probability that a prompt is sent again, cut to a multiple of `align`.
        align: block size to which prompts that are sent again are cut, in tokens.
        loras: adapters; one conversation in two uses one of them, if there are any.
        salts: cache salts; one conversation in four uses one of them, if there are any.
        vocabulary: token ids are below this.

    Examples:
        >>> workload = Workload(3, seed=7)
        >>> [len(request.token_ids) for request in workload]
        [62, 90, 65]
        >>> list(workload) == list(workload)
        True
    """

    def __init__(
        self,
        requests: int = 100,
        *,
        seed: int = 0,
        system_prompts: int = 3,
        system_tokens: int = 40,
        turn_tokens: int = 40,
        new_tokens: int = 24,
        max_tokens: int = 400,
        resend: float = 0.15,
        align: int = 16,
        loras: Sequence[str] = (),
        salts: Sequence[str] = (),
        vocabulary: int = 32_000,
    ) -> None:
        counts = (system_prompts, turn_tokens, new_tokens, align, vocabulary)
        if requests < 0 or system_tokens < 0 or min(counts) < 1 or not 0 <= resend <= 1:
            raise ConfigurationError(
                "requests and system_tokens are at least 0; system_prompts, turn_tokens, "
                "new_tokens, align and vocabulary at least 1; resend is a probability"
            )
        if max_tokens < system_tokens + turn_tokens + new_tokens:
            raise ConfigurationError(
                f"max_tokens is {max_tokens}, below one turn of "
                f"{system_tokens + turn_tokens + new_tokens} tokens"
            )
        self._requests = requests
        self._seed = seed
        self._system = (system_prompts, system_tokens)
        self._turn_tokens = turn_tokens
        self._new_tokens = new_tokens
        self._max_tokens = max_tokens
        self._resend = resend
        self._align = align
        self._loras = tuple(loras)
        self._salts = tuple(salts)
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return self._requests

    def __iter__(self) -> Iterator[Request]:
        rng = random.Random(self._seed)
        count, length = self._system
        systems = [self._text(rng, length) for _ in range(count)]
        conversations: list[_Conversation] = []
        sent: list[Request] = []
        for _ in range(self._requests):
            if sent and rng.random() < self._resend:
                old = rng.choice(sent[-20:])
                # Cut to whole blocks: the case in which an engine must compute a cached last block
                # again. It is not kept: it would crowd out what was sent first.
                cut = len(old.token_ids) // self._align * self._align or len(old.token_ids)
                new = self._text(rng, rng.randint(1, self._new_tokens))
                yield msgspec.structs.replace(old, token_ids=old.token_ids[:cut], new_tokens=new)
                continue
            conversation = self._conversation(rng, systems, conversations)
            prompt = conversation.token_ids + self._text(rng, rng.randint(1, self._turn_tokens))
            new = self._text(rng, rng.randint(1, self._new_tokens))
            conversation.token_ids = prompt + new
            lora, salt = conversation.lora, conversation.salt
            request = Request(token_ids=prompt, new_tokens=new, lora=lora, salt=salt)
            sent.append(request)
            yield request

    def _text(self, rng: random.Random, length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(self._vocabulary) for _ in range(length))

    def _conversation(
        self,
        rng: random.Random,
        systems: list[tuple[int, ...]],
        conversations: list[_Conversation],
    ) -> _Conversation:
        most = self._max_tokens - self._turn_tokens - self._new_tokens
        # The oldest of many and those that became too long end, as users leave.
        conversations[:] = [item for item in conversations[-16:] if len(item.token_ids) <= most]
        if conversations and rng.random() < 0.6:
            return rng.choice(conversations)
        lora = rng.choice(self._loras) if self._loras and rng.random() < 0.5 else None
        salt = rng.choice(self._salts) if self._salts and rng.random() < 0.25 else None
        conversations.append(_Conversation(rng.choice(systems), lora, salt))
        return conversations[-1]
