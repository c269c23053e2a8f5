"""Certificates that endpoints show, and whose are believed."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption
from yarl import URL

from kvbaton.errors import ConfigError
from kvbaton.server.app import make_app, serve_on
from kvbaton.server.config import EndpointConfig
from kvbaton.server.network import TlsConfig, TrustConfig, bind
from kvbaton.server.node_app import make_starting_app
from kvbaton.text.tokenizer import Tokenizer
from tests.server.conftest import make_frontend
from tests.support.certificates import NAME, write_certificates
from tests.support.scripted_source import ScriptedSource
from tests.support.waiting import PATIENCE_S, eventually


async def ask(url: str, trust: TrustConfig) -> int:
    named = URL(f"{url}/version")
    async with (
        aiohttp.ClientSession() as session,
        session.get(
            named.with_host("127.0.0.1"), ssl=trust.client(url), server_hostname=named.host
        ) as response,
    ):
        return response.status


async def test_a_certificate_is_shown_and_checked(tmp_path: Path, tokenizer: Tokenizer) -> None:
    ca, certificate, key = map(str, write_certificates(tmp_path))
    tls = TlsConfig(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=ca)
    assert tls.scheme == "https"
    app = make_app(make_frontend(ScriptedSource(tokenizer), tokenizer))
    runner = await serve_on(bind("127.0.0.1", 0), app, EndpointConfig(tls=tls))
    port = runner.addresses[0][1]
    try:
        assert await ask(f"https://{NAME}:{port}", tls) == 200
        assert await ask(f"https://127.0.0.1:{port}", TrustConfig()) == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(f"https://{NAME}:{port}", TrustConfig())
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(f"https://other.example:{port}", tls)
        with pytest.raises(aiohttp.ClientError):
            await ask(f"http://{NAME}:{port}", tls)
    finally:
        await runner.cleanup()


async def test_a_connection_does_not_outlive_the_start_of_a_node(tmp_path: Path) -> None:
    """Its handshake ends when others were closed: a router would hear of the start for ever."""
    ca, certificate, key = map(str, write_certificates(tmp_path))
    tls = TlsConfig(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=ca)
    app = make_starting_app()
    runner = await serve_on(bind("127.0.0.1", 0), app, EndpointConfig(tls=tls))
    port = runner.addresses[0][1]
    try:
        late, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await ask(f"https://{NAME}:{port}", tls) == 503, "both were accepted"
    finally:
        await runner.cleanup()
    await writer.start_tls(ssl.create_default_context(cafile=ca), server_hostname=NAME)
    writer.write(b"GET /health HTTP/1.1\r\nHost: node\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert (await late.read()).startswith(b"HTTP/1.1 503"), "to the connection's end"
    writer.close()


async def test_a_renewed_certificate_is_shown_without_a_restart(
    tmp_path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("kvbaton.server.app.RENEW_PERIOD_S", 0.01)
    _, certificate, key = write_certificates(tmp_path)
    tls = TlsConfig(ssl_certfile=str(certificate), ssl_keyfile=str(key))
    new = tmp_path / "new"
    new.mkdir()
    ca, *renewed = write_certificates(new)
    trust = TrustConfig(ssl_ca_certs=str(ca))
    app = make_app(make_frontend(ScriptedSource(tokenizer), tokenizer))
    runner = await serve_on(bind("127.0.0.1", 0), app, EndpointConfig(tls=tls))
    url = f"https://{NAME}:{runner.addresses[0][1]}"
    try:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(url, trust)
        renewed[0].replace(certificate)  # as yet without its key
        await eventually(lambda: "can't be used" in caplog.text)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(url, trust)
        with caplog.at_level("INFO"):
            renewed[1].replace(key)
            await eventually(lambda: "was renewed" in caplog.text)
        assert await ask(url, trust) == 200
        key.unlink()
        await eventually(lambda: "No such file" in caplog.text)
        assert await ask(url, trust) == 200
    finally:
        await runner.cleanup()
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 2, "each reason is told once"


def test_an_unchanged_certificate_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, certificate, key = map(str, write_certificates(tmp_path))
    tls = TlsConfig(ssl_certfile=certificate, ssl_keyfile=key)
    made: list[object] = []
    monkeypatch.setattr(ssl, "create_default_context", made.append)
    assert not tls.renew()
    assert not made


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    ca, _, key = map(str, write_certificates(tmp_path))
    with pytest.raises(ConfigError, match="--ssl-keyfile: needs --ssl-certfile"):
        TlsConfig(ssl_keyfile=key)
    with pytest.raises(ConfigError, match="--ssl-certfile: /nope can't be used"):
        TlsConfig(ssl_certfile="/nope")
    with pytest.raises(ConfigError, match=r"--ssl-certfile: .* can't be used"):
        TlsConfig(ssl_certfile=ca, ssl_keyfile=key)
    with pytest.raises(ConfigError, match="private key is in another file: --ssl-keyfile"):
        TlsConfig(ssl_certfile=ca)
    for wrong in ("/nope", key):
        with pytest.raises(ConfigError, match=r"--ssl-ca-certs: .* can't be used"):
            TrustConfig(ssl_ca_certs=wrong)
    write_certificates(tmp_path, BestAvailableEncryption(b"secret"))
    with pytest.raises(ConfigError, match=r"--ssl-certfile: .* can't be used"):
        TlsConfig(ssl_certfile=str(tmp_path / "cert.pem"), ssl_keyfile=str(tmp_path / "key.pem"))
