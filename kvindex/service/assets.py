"""The page's own files: read once, served from memory, with headers that let in nothing else."""

from __future__ import annotations

import hashlib
import importlib.resources
from functools import partial
from typing import Final, NamedTuple

from kvindex.service.http.messages import Headers, Reply, Request, Route
from kvindex.service.openapi import media, parameter, route

HEADERS: Final[Headers] = (
    (
        b"content-security-policy",
        b"default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'",
    ),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-cache"),  # asked for again each time, and mostly answered by 304
)
"""Of the page and of each of its files. Nothing inline runs, and nothing comes from elsewhere."""

_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}


class Asset(NamedTuple):
    """One file: its bytes, media type and tag."""

    body: bytes
    media_type: bytes
    etag: bytes


def read_assets() -> dict[str, Asset]:
    """Return the package's static files by their name, e.g. "app.js"."""
    assets = {}
    for entry in (importlib.resources.files("kvindex.service") / "static").iterdir():
        media_type = _TYPES.get("." + entry.name.rpartition(".")[2])
        if media_type is not None:
            body = entry.read_bytes()
            etag = b'"%b"' % hashlib.sha256(body).hexdigest()[:16].encode()
            assets[entry.name] = Asset(body, media_type, etag)
    return assets


def asset_routes() -> list[Route]:
    """Return the routes of `/` and of each file under `/static/`, which are not described."""
    assets = read_assets()
    page = route(
        "GET /",
        partial(_serve, assets.pop("index.html")),
        "The page",
        {
            "200": media("text/html", "For a browser."),
            "304": {"description": "It has not changed."},
        },
        parameters=[parameter("If-None-Match", "the ETag of what is there", where="header")],
    )
    files = assets.items()
    return [page, *(Route("GET", f"/static/{path}", partial(_serve, of)) for path, of in files)]


def _serve(asset: Asset, request: Request) -> Reply:
    fields = (*HEADERS, (b"etag", asset.etag))
    if asset.etag in (request.header(b"if-none-match") or b""):
        return Reply(304, b"", b"", fields)
    return Reply(200, asset.body, asset.media_type, fields)
