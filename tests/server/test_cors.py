"""Web pages of other origins that ask from a browser."""

from __future__ import annotations

from typing import Any

import pytest

from kvbaton.errors import ConfigError
from kvbaton.server.config import EndpointConfig

PATH = "/v1/completions"
PAGE = "https://chat.example"
ASK = {"prompt": "Hi", "max_tokens": 2}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
ALLOWED = "Access-Control-Allow-Origin"


@pytest.mark.parametrize("origins", [(PAGE, "http://127.0.0.1:3000"), ("*",)])
async def test_a_page_that_is_allowed_may_ask(serve: Any, origins: tuple[str, ...]) -> None:
    endpoint = await serve(allowed_origins=origins, api_keys=("key",))
    from_page = {"Origin": PAGE}
    async with endpoint.session.options(PATH, headers={**from_page, **PREFLIGHT}) as response:
        assert (response.status, response.headers[ALLOWED]) == (204, PAGE)
        assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
    with_key = {**from_page, "Authorization": "Bearer key"}
    for stream in (False, True):
        body = {**ASK, "stream": stream}
        async with endpoint.session.post(PATH, json=body, headers=with_key) as response:
            assert (response.status, response.headers[ALLOWED]) == (200, PAGE)
            assert response.headers["Vary"] == "Origin"
            shown = response.headers["Access-Control-Expose-Headers"].split(", ")
            assert {"X-Request-Id", "Request-Id", "Retry-After", "X-Should-Retry"} == set(shown)
            await response.read()
    async with endpoint.session.post(PATH, json=ASK, headers=from_page) as response:
        assert (response.status, response.headers[ALLOWED]) == (401, PAGE), "it may read why"


async def test_others_may_not(serve: Any) -> None:
    endpoint = await serve(allowed_origins=(PAGE,))
    for origin in ("https://other.example", "null", f"{PAGE}:8443"):
        headers = {"Origin": origin, **PREFLIGHT}
        async with endpoint.session.options(PATH, headers=headers) as response:
            assert ALLOWED not in response.headers
    async with endpoint.session.get("/version", headers={"Origin": PAGE}) as response:
        assert ALLOWED not in response.headers, "pages ask for texts only"
    bare = await serve()
    async with bare.session.options(PATH, headers={"Origin": PAGE, **PREFLIGHT}) as response:
        assert response.status == 405
    async with bare.session.post(PATH, json=ASK, headers={"Origin": PAGE}) as response:
        assert (response.status, ALLOWED in response.headers) == (200, False)


@pytest.mark.parametrize("wrong", ['["*"]', "chat.example", f"{PAGE}/", "https://*.example/a"])
def test_what_is_no_origin_is_named(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins"):
        EndpointConfig(allowed_origins=(wrong,))
