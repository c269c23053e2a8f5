"""``kvbaton router`` without ``--model``: the first node that registers says what is served."""

from __future__ import annotations

import asyncio
import ssl
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvbaton.errors import ConfigError
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router import app
from kvbaton.router.config import RouterConfig
from kvbaton.server.network import bind
from tests.support.certificates import NAME, write_certificates
from tests.support.scripted_source import write_tokenizer


async def post(session: aiohttp.ClientSession, info: NodeInfo) -> tuple[int, Any]:
    async with session.post("/nodes", data=msgspec.json.encode(info)) as response:
        return response.status, await response.json()


async def test_it_waits_for_the_first_node_whose_model_is_here(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    info = NodeInfo(
        node_id="d0", generation="1", role="decode", url="http://127.0.0.1:9", model="fine",
        aliases=["org/fine"],
    )  # fmt: skip
    router = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvbaton", "router", "--port", "0"), stderr=asyncio.subprocess.PIPE
    )
    assert router.stderr is not None
    try:
        async with asyncio.timeout(60):
            line = (await router.stderr.readline()).decode()
            assert "waiting at http://127.0.0.1:" in line
            url = line.partition(" at ")[2].split()[0]
            async with aiohttp.ClientSession(url) as session:
                async with session.get("/v1/models") as response:
                    assert (response.status, response.headers["Retry-After"]) == (503, "1")
                for path in ("/nowhere", "/" + "n" * 256):  # the kernel refuses to look at this one
                    elsewhere = msgspec.structs.replace(info, model_path=path)
                    status, answer = await post(session, elsewhere)
                    assert (status, answer["error"]["param"]) == (409, "model_path")
                    assert "--model" in answer["error"]["message"]
                status, answer = await post(session, msgspec.structs.replace(info, role="chef"))
                assert (status, answer["error"]["param"]) == (400, "role")
                here = msgspec.structs.replace(info, model_path=str(folder))
                status, answer = await post(session, here)
                assert status == 503, "to be repeated, as a node does"
                assert "first loads the tokenizer" in answer["error"]["message"]
                while (await router.stderr.readline()).decode().find("listening on") < 0:
                    pass
                assert (await post(session, here))[0] == 200
                async with session.get("/nodes") as response:
                    (node,) = (await response.json())["nodes"]
                assert (node["node_id"], node["model"]) == ("d0", "fine")
                for name, status in {"fine": 503, "org/fine": 503, "other": 404}.items():
                    async with session.get(f"/v1/models/{name}") as response:
                        assert response.status == status, "no node is ready, or no such model"
    finally:
        router.terminate()
        await router.wait()


async def test_it_can_be_told_to_stop_while_it_waits() -> None:
    """By a handler: without one, SIGTERM does nothing to a container's first process."""
    router = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvbaton", "router", "--port", "0"), stderr=asyncio.subprocess.PIPE
    )
    assert router.stderr is not None
    async with asyncio.timeout(60):
        assert b"waiting at" in await router.stderr.readline()
        router.terminate()
        assert (await router.stderr.read(), await router.wait()) == (b"", 0)


async def test_a_node_whose_handshake_outlasts_the_wait_comes_again(tmp_path: Path) -> None:
    """Such a connection is opened after all others were closed; a node would keep it for ever."""
    folder = write_tokenizer(tmp_path)
    ca, certificate, key = map(str, write_certificates(tmp_path))
    info = NodeInfo(
        node_id="d0", generation="1", role="decode", url="http://127.0.0.1:9", model="fine",
        model_path=str(folder),
    )  # fmt: skip
    router = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvbaton", "router", "--port", "0"),
        *("--ssl-certfile", certificate, "--ssl-keyfile", key),
        stderr=asyncio.subprocess.PIPE,
    )
    assert router.stderr is not None
    try:
        async with asyncio.timeout(60):
            line = (await router.stderr.readline()).decode()
            url = line.partition(" at ")[2].split()[0]
            late, to_router = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":")[-1]))
            connector = aiohttp.TCPConnector(ssl=False)
            async with aiohttp.ClientSession(url, connector=connector) as session:
                assert (await post(session, info))[0] == 503
                while (await router.stderr.readline()).decode().find("listening on") < 0:
                    pass
            await to_router.start_tls(ssl.create_default_context(cafile=ca), server_hostname=NAME)
            body = msgspec.json.encode(info)
            to_router.write(b"POST /nodes HTTP/1.1\r\nHost: router\r\nContent-Length: %d\r\n\r\n"
                            % len(body) + body)  # fmt: skip
            answer = await late.read()  # to its end: the connection was closed
            assert answer.startswith(b"HTTP/1.1 503"), "else it was not late enough"
            assert b"Connection: close" in answer
            to_router.close()
    finally:
        router.terminate()
        await router.wait()


async def test_why_a_node_that_a_flag_names_does_not_answer_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was told twice a second, and the error at the end did not name it."""
    caplog.set_level("INFO", "kvbaton.router.app")
    monkeypatch.setattr(app, "STATIC_NODE_S", 0.1)
    monkeypatch.setattr(app, "ASK_PERIOD_S", 0.02)
    with bind("127.0.0.1", 0) as listener, bind("127.0.0.1", 0) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        closed.close()
        with pytest.raises(ConfigError, match=rf"{url}: Cannot connect"):
            await app.find_model(RouterConfig(decode=(url,)), listener)
    assert caplog.text.count("waiting for") == 1
