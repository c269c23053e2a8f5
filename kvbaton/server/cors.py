"""Web pages of other origins that may ask from a browser (CORS, as the Fetch standard has it)."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from kvbaton.server.auth import PROTECTED
from kvbaton.server.bodies import HEADER
from kvbaton.server.frontend import FRONTEND

ANY = "*"
PREFLIGHT = "Access-Control-Request-Method"
PREFLIGHT_KEPT_S = 600


def let_origins_in(app: web.Application) -> None:
    """Answer pages of the origins that the configuration allows, where clients ask for text.

    What is for operators is not for pages.
    """
    app.middlewares.insert(0, answer_preflight)
    app.on_response_prepare.append(allow_origin)


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A browser asks whether it may ask; it presents no key then."""
    if request.method == "OPTIONS" and PREFLIGHT in request.headers:
        return web.Response(status=204)
    return await handler(request)


async def allow_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Signal ``on_response_prepare``: say that the page may read the answer."""
    origin, allowed = request.headers.get("Origin"), request.app[FRONTEND].config.allowed_origins
    if not request.path.startswith(PROTECTED):
        return
    response.headers.add("Vary", "Origin")
    if origin is None or not {origin, ANY} & set(allowed):
        return
    headers = {"Allow-Origin": origin, "Expose-Headers": f"{HEADER}, Retry-After"}
    if PREFLIGHT in request.headers:
        headers |= {
            "Allow-Methods": "GET, POST",
            "Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
            "Max-Age": str(PREFLIGHT_KEPT_S),
        }
    for name, value in headers.items():
        response.headers[f"Access-Control-{name}"] = value
