"""Dynamo's peers: there are none here, and this says so.

Dynamo's indexer copies the blocks of a peer, and then answers for workers that nobody registered
with it. A new kvindex starts from `GET /snapshot` of another one, and replay verifies that.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvindex.service.asking import UNREADABLE, media_type
from kvindex.service.replies import JSON, Reply, json_reply, refused, text_reply

__all__ = ["peer_routes"]


class _Peer(msgspec.Struct, frozen=True):
    url: str


def peer_routes() -> list[Route]:
    """Return the routes `/peers`, `/register_peer` and `/deregister_peer`."""
    return [
        Route("/peers", _peers, methods=["GET"]),
        Route("/register_peer", _register_peer, methods=["POST"]),
        Route("/deregister_peer", _deregister_peer, methods=["POST"]),
    ]


async def _peers(request: Request) -> Response:
    return json_reply(200, []).response()


async def _register_peer(request: Request) -> Response:
    said = "kvindex has no peers: start a replica with --warm-from URL, which takes GET /snapshot"
    return (await _refusal(request) or refused(501, said)).response()


async def _deregister_peer(request: Request) -> Response:
    return (await _refusal(request) or refused(404, "peer not found")).response()


async def _refusal(request: Request) -> Reply | None:
    """Return what is wrong with a body that should name a peer, None if nothing is."""
    if media_type(request.headers.get("content-type", "").encode("latin-1")) != JSON:
        return text_reply(415, "send the body with content-type: application/json")
    try:
        msgspec.json.decode(await request.body(), type=_Peer)
    except msgspec.ValidationError as error:
        return text_reply(422, f"the body has not the right form: {error}")
    except UNREADABLE as error:
        return text_reply(400, f"the body is no JSON: {error}")
    return None
