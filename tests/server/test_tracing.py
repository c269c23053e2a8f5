"""Whether there are traces, and where they go."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbaton.errors import ConfigError
from kvbaton.server.tracing import TracingConfig
from tests.support.otlp_receiver import OtlpReceiver

VARIABLES = ("TRACES_ENDPOINT", "ENDPOINT")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*(f"OTEL_EXPORTER_OTLP_{v}" for v in VARIABLES), "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def nothing(name: str, package: str | None = None) -> Any:
        return None if name.startswith("opentelemetry") else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", nothing)


def test_off_by_default(without_packages: None) -> None:
    assert TracingConfig.of(None, "router", "") is None


def test_its_api_by_itself_does_no_harm(tmp_path: Path) -> None:
    package = tmp_path / "opentelemetry"
    package.mkdir()
    (package / "__init__.py").write_text("")
    code = (
        "from kvbaton.server.tracing import TracingConfig; print(TracingConfig.of(None, 'any', ''))"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_nothing_is_imported_while_it_is_off() -> None:
    code = (
        "import sys, kvbaton.router.app, kvbaton.server.node; print('opentelemetry' in sys.modules)"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://host:4318", "http://host:4318/v1/traces"),
        ("https://host/", "https://host/v1/traces"),
        ("http://host:4318/v1/traces", "http://host:4318/v1/traces"),
        ("http://host/otlp/v1/traces", "http://host/otlp/v1/traces"),
    ],
)
def test_where_they_go(given: str, meant: str) -> None:
    config = TracingConfig.of(given, "router", "")
    assert config is not None
    assert config.endpoint == meant


@pytest.mark.parametrize(
    "address",
    ["host:4317", "grpc://host:4317", "", "http://", "http://[::1", "http://host:port"],
)
def test_a_wrong_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint.*is no http URL"):
        TracingConfig.of(address, "router", "")


def test_the_missing_extra_is_named(without_packages: None) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'kvbaton\[otel\]'"):
        TracingConfig.of("http://host:4318", "router", "")


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_standards_variables_count(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{variable}", "http://host:4318")
    config = TracingConfig.of(None, "prefill", "p0")
    assert config == TracingConfig("", "prefill", "p0"), "the exporter reads them itself"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert TracingConfig.of(None, "prefill", "p0") is None


def test_a_variable_of_the_machine_does_not_keep_us_from_serving(
    monkeypatch: pytest.MonkeyPatch, without_packages: None, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://host:4318")
    assert TracingConfig.of(None, "router", "") is None
    assert "kvbaton[otel]" in caplog.text


# --- with an endpoint over a scripted source, which marks nothing ---


async def test_what_fails_is_told_too(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    trace = "0af7651916cd43dd8448eb211c80319c"
    with OtlpReceiver() as receiver:
        traces = TracingConfig.of(receiver.endpoint, "router", "")
        endpoint = await serve(traces=traces)
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
        body = {"prompt": [5, 6], "max_tokens": 4}
        status, _ = await endpoint.post("/v1/completions", body, headers=headers)
        assert status == 200
        endpoint.source.failure = RuntimeError("it broke")
        status, _ = await endpoint.post("/v1/completions", body, headers=headers)
        assert status == 500
        (ask,) = {ask.traceparent[:35] for ask in endpoint.source.requests}
        assert ask == f"00-{trace}", "engines are told"
        await endpoint.runner.cleanup()
        roots = [s for s in receiver.trace(trace, requests=2) if "http.route" in s.attributes]
    assert [root.failed for root in roots] == [False, True]
    assert [root.attributes["http.response.status_code"] for root in roots] == [200, 500]
    assert roots[0].attributes["gen_ai.operation.name"] == "text_completion"
