"""Responses whose body is JSON."""

from __future__ import annotations

import msgspec
from aiohttp import web

from baton_router.http.media_types import JSON_TYPE


def json_response(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type=JSON_TYPE)
