"""A trace collector in this process: OTLP over HTTP, decoded by the standard's types."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import pytest

from tests.support.waiting import until


@dataclass(frozen=True)
class ReceivedSpan:
    """A received span; ids in hex, times in seconds since the epoch."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    service: str
    instance: str
    attributes: dict[str, Any]
    events: dict[str, float]
    failed: bool

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def paths(self) -> list[str]:
        """Tokens on whose critical path the span is."""
        return list(self.attributes.get("kvbaton.critical_path", ()))


class OtlpReceiver:
    """Listens in its own threads while the context lasts.

    Attributes:
        status: HTTP status of answers to exports.
        exports: Number of exports received.
    """

    def __init__(self) -> None:
        # Imported here only: GPU machines lack it, and their tests need no traces.
        types = "opentelemetry.proto.collector.trace.v1.trace_service_pb2"
        self._types = pytest.importorskip(types)
        self.status, self.exports = 200, 0
        self._spans: list[ReceivedSpan] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.exports += 1
                if receiver.status == 200 and self.path == "/v1/traces":
                    receiver._take(body)
                self.send_response(receiver.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def _take(self, body: bytes) -> None:
        request = self._types.ExportTraceServiceRequest.FromString(body)
        spans = []
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    spans.append(
                        ReceivedSpan(
                            name=span.name,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            start=span.start_time_unix_nano / 1e9,
                            end=span.end_time_unix_nano / 1e9,
                            service=resource["service.name"],
                            instance=resource.get("service.instance.id", ""),
                            attributes=_attributes(span.attributes),
                            events={e.name: e.time_unix_nano / 1e9 for e in span.events},
                            failed=span.status.code == 2,
                        )
                    )
        self._spans += spans

    def trace(self, trace_id: str, requests: int = 1) -> list[ReceivedSpan]:
        """Wait for all spans of a trace of `requests` HTTP requests, whose own spans come last."""

        def found() -> list[ReceivedSpan]:
            return [span for span in self._spans if span.trace_id == trace_id]

        def complete() -> bool:
            return sum("http.route" in span.attributes for span in found()) == requests

        until(complete, f"{requests} requests in trace {trace_id}")
        return found()

    def traced(self) -> set[str]:
        """Ids of all traces."""
        return {span.trace_id for span in self._spans}


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
