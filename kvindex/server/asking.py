"""POST /query: a body in, an answer out, the same for the short cut and for the app."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvindex.server.catalog import DEFAULT_GROUP, Partition
from kvindex.server.replies import TEXT, Reply, refused
from kvindex.server.service import Service

__all__ = ["answer"]

_U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class _Query(msgspec.Struct, frozen=True):
    token_ids: list[_U32]
    model_name: str
    routing_group: str = DEFAULT_GROUP
    lora_name: str | None = None
    cache_salt: str | None = None


_decoder = msgspec.json.Decoder(_Query)


def answer(service: Service, body: bytes, content_type: bytes | None) -> Reply:
    """Return the answer to a query.

    Args:
        service: what answers.
        body: of the request.
        content_type: its header field, None if it is missing.
    """
    kind = b"" if content_type is None else content_type.partition(b";")[0].strip().lower()
    if kind != b"application/json":
        return Reply(415, b"send the query with content-type: application/json", TEXT)
    try:
        query = _decoder.decode(body)
    except msgspec.ValidationError as error:
        return Reply(422, f"the query has not the right form: {error}".encode(), TEXT)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Reply(400, f"the body is no JSON: {error}".encode(), TEXT)
    partition = Partition(query.model_name, query.routing_group)
    ranks = service.ranks_of(partition)
    if ranks is None:
        return refused(404, f"no indexer for {partition}")
    from array import array

    tokens = memoryview(array("I", query.token_ids))
    match, trusts = service.match(ranks, tokens, lora=query.lora_name, salt=query.cache_salt)
    return Reply(200, ranks.form("dynamo").write(match, trusts))
