"""The page's own files: read once, served from memory, with headers that let in nothing else."""

from __future__ import annotations

import hashlib
import importlib.resources
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

__all__ = ["HEADERS", "Asset", "asset_routes", "read_assets"]

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # asked for again each time, and mostly answered by 304
}
"""Of the page and of each of its files. Nothing inline runs, and nothing comes from elsewhere."""

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Asset(NamedTuple):
    """One file: its bytes, media type and tag."""

    body: bytes
    media_type: str
    etag: str


def read_assets() -> dict[str, Asset]:
    """Return the package's static files by their name, e.g. "app.js"."""
    found = {}
    for entry in (importlib.resources.files("kvindex.service") / "static").iterdir():
        media_type = _TYPES.get("." + entry.name.rpartition(".")[2])
        if media_type is not None:
            body = entry.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            found[entry.name] = Asset(body, media_type, etag)
    return found


def asset_routes() -> list[BaseRoute]:
    """Return the routes of `/` and of each file under `/static/`."""
    assets = read_assets()
    routes: list[BaseRoute] = [_route("/", assets.pop("index.html"))]
    return routes + [_route(f"/static/{path}", asset) for path, asset in assets.items()]


def _route(path: str, asset: Asset) -> Route:
    headers = {**HEADERS, "ETag": asset.etag}

    async def serve(request: Request) -> Response:
        if asset.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(asset.body, media_type=asset.media_type, headers=headers)

    return Route(path, serve, methods=["GET"], include_in_schema=False)
