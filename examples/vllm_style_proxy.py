r"""A proxy written for vLLM: it asks first the prefill node, then the decode node.

It is not specific to kvbaton: it asks the prefill node for one token with ``do_remote_decode``, and
copies the ``kv_transfer_params`` of the answer, unread, into the decode node's request::

    python examples/vllm_style_proxy.py --prefill http://127.0.0.1:8100 \
        --decode http://127.0.0.1:8200 --port 8000

kvbaton's own router sends both requests at once, which hides the hand-over; see `kvbaton router`.
"""

import argparse
import uuid

import aiohttp
from aiohttp import web

ASK = {"do_remote_decode": True, "do_remote_prefill": False}
FIELDS = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "max_completion_tokens")
PATHS = ("/v1/completions", "/v1/chat/completions")
SESSION = web.AppKey("session", aiohttp.ClientSession)
URLS = web.AppKey("urls", tuple[str, str])


def wrong(message: str) -> web.Response:
    """An error in the format of OpenAI's API. The prefill node validates the body's fields."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return web.json_response({"error": error}, status=400)


async def forward(request: web.Request) -> web.StreamResponse:
    """Serve one request on the prefill node, then on the decode node."""
    session, (prefill, decode) = request.app[SESSION], request.app[URLS]
    headers = {"X-Request-Id": request.headers.get("X-Request-Id") or uuid.uuid4().hex}
    if "Authorization" in request.headers:
        headers["Authorization"] = request.headers["Authorization"]
    try:
        body = await request.json()
    except ValueError as error:  # not JSON, or not UTF-8
        return wrong(f"the body is no JSON: {error}")
    if not isinstance(body, dict):
        return wrong("the body must be a JSON object")
    first = {key: value for key, value in body.items() if key not in NOT_FOR_PREFILL}
    first |= {"max_tokens": 1, "stream": False}
    first["kv_transfer_params"] = {**ASK, **dict.fromkeys(FIELDS)}
    async with session.post(prefill + request.path, json=first, headers=headers) as answer:
        if answer.status != 200:
            return web.Response(
                status=answer.status, body=await answer.read(), content_type="application/json"
            )
        params = (await answer.json()).get("kv_transfer_params")
    second = body | ({"kv_transfer_params": params} if params else {})
    async with session.post(decode + request.path, json=second, headers=headers) as answer:
        kind = {name: answer.headers[name] for name in ("Content-Type", "X-Request-Id")}
        response = web.StreamResponse(status=answer.status, headers=kind)
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    return response


async def make_app(prefill: str, decode: str) -> web.Application:
    """The proxy in front of two nodes."""
    app = web.Application(client_max_size=32 << 20)
    app[URLS] = (prefill, decode)
    app[SESSION] = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))
    app.on_cleanup.append(lambda app: app[SESSION].close())
    app.add_routes([web.post(path, forward) for path in PATHS])
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prefill, then decode.")
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    web.run_app(make_app(args.prefill, args.decode), host="127.0.0.1", port=args.port)
