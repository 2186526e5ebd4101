"""The live page at `/` of the admin port: three files that hold no data. What they show they ask of the admin API, with
the token where there is one, and they change nothing.

No build step and nothing from elsewhere: the browser is told to load from here alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)


def page_routes() -> APIRouter:
    """The files, read once."""
    routes = APIRouter()
    folder = resources.files("gateway.admin") / "live_page"
    for path, (name, media) in _FILES.items():
        content = (folder / name).read_bytes()
        routes.add_api_route(path, _file(content, media), include_in_schema=False, name=f"page {name}")
    return routes


def _file(content: bytes, media: str) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return Response(content, media_type=media, headers={"content-security-policy": _POLICY})

    return answer
