"""One OpenTelemetry trace per request; its spans are made from the request's timelines at its end.

The process that the client asked makes all spans, including those of the nodes that it asked in
turn, from their marks (`messages.engine.Mark`): engines and transfer threads do not know
OpenTelemetry. Marks are on this machine's monotonic clock by then. The wall clock is read once per
request to turn them into dates, so that setting the clock meanwhile moves no border.

The packages are the extra ``otel``. Without an endpoint nothing of this file runs.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from aiohttp import web
from msgspec.structs import replace

from kvbaton.errors import ConfigError, EngineDeadError, RequestError
from kvbaton.messages.engine import AddRequest
from kvbaton.server.config import check_url
from kvbaton.server.timeline import NodePart, RequestTimeline
from kvbaton.version import __version__

logger = logging.getLogger(__name__)

FLAG = "--otlp-traces-endpoint"
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MISSING = "traces need opentelemetry: pip install 'kvbaton[otel]'"
TRACES_PATH = "/v1/traces"
CLOSE_S = 3.0
"""Seconds that a collector which does not answer may delay the end of the process."""
CLIENT_CLOSED_REQUEST = 499
EVENTS = ("received", "preempted", "first_landed", "load_failed", "failed")
"""Marks that a node's span shows as events."""
ARRIVED = web.RequestKey("arrived", float)
"""When the head of a request arrived, in seconds on the monotonic clock."""


@dataclass(frozen=True)
class TracingConfig:
    """Where traces go, and which process sends them.

    Attributes:
        endpoint: Whole URL of OTLP over HTTP; empty for the environment's.
        role: Role of this process: ``router``, or that of a node.
        instance: Name of the node; empty for a router.
    """

    endpoint: str
    role: str
    instance: str = ""

    @classmethod
    def of(cls, endpoint: str | None, role: str, instance: str) -> TracingConfig | None:
        """Settings from the flag and the environment; None for no traces.

        Raises:
            ConfigError: The flag is not a URL, or the packages are missing.
        """
        try:
            there = importlib.util.find_spec("opentelemetry.exporter.otlp") is not None
        except ModuleNotFoundError:  # no package of it is there, or only the API
            there = False
        if endpoint is not None:
            check_url(FLAG, endpoint)
            if not there:
                raise ConfigError(FLAG, MISSING)
            parts = urlsplit(endpoint)
            whole = parts._replace(path=TRACES_PATH) if parts.path in ("", "/") else parts
            return cls(whole.geturl(), role, instance)
        named = [name for name in ENDPOINT_VARIABLES if os.environ.get(name)]
        disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        if not named or disabled or os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
            return None
        if not there:  # the variable may be set for all programs on the machine
            logger.warning("%s is set, but %s", named[0], MISSING)
            return None
        return cls("", role, instance)


class Tracing:
    """Makes and exports the spans of this process's requests.

    A separate thread exports spans, and drops those that can't be exported; requests don't wait.

    Args:
        config: Where traces go.
    """

    def __init__(self, config: TracingConfig) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._config = config
        self._exporter = OTLPSpanExporter(endpoint=config.endpoint or None)
        self._processor = BatchSpanProcessor(self._exporter)
        self._tracers: dict[tuple[str, str], Any] = {}
        self._service = os.environ.get("OTEL_SERVICE_NAME", "")
        own = self._service or f"kvbaton-{config.role}"
        # The environment's sampler decides about the request; all its other spans follow.
        self._own = self._tracer(own, config.instance, sampler=None)

    def _tracer(self, service: str, instance: str, sampler: Any) -> Any:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        named = {"service.name": service}
        if instance:
            named["service.instance.id"] = instance
        provider = TracerProvider(
            sampler=sampler, resource=Resource.create(named), shutdown_on_exit=False
        )
        provider.add_span_processor(self._processor)
        return provider.get_tracer("kvbaton", __version__)

    def tracer_of(self, part: NodePart | None) -> Any:
        """The tracer of a node, or of this process for None."""
        if part is None or not part.node:
            return self._own
        key = part.node, part.part.partition("-")[0]
        if key not in self._tracers:
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON

            kind = {"source": "prefill", "target": "decode"}.get(key[1], key[1])
            service = f"{self._service or 'kvbaton'}-{kind}"
            self._tracers[key] = self._tracer(service, part.node, ALWAYS_ON)
        return self._tracers[key]

    def start(self, request: web.Request) -> RequestSpan | None:
        """Start the span of a request, in the client's trace if the request has one.

        Returns:
            The span; None if the ``traceparent`` or the sampler says not to trace the request.
        """
        try:
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            names = ("traceparent", "tracestate")
            carrier = {name: request.headers[name] for name in names if name in request.headers}
            ahead_ns = time.time_ns() - time.monotonic_ns()
            resource = request.match_info.route.resource
            path = request.path if resource is None else resource.canonical
            span = self._own.start_span(
                f"{request.method} {path}",
                context=TraceContextTextMapPropagator().extract(carrier),
                kind=SpanKind.SERVER,
                start_time=int(request[ARRIVED] * 1e9) + ahead_ns,
                attributes={"http.request.method": request.method, "http.route": path},
            )
            return RequestSpan(self, span, ahead_ns) if span.is_recording() else None
        except Exception:
            logger.exception("a trace can't be begun")
            return None

    async def close(self, app: web.Application) -> None:
        """Export the remaining spans, within `CLOSE_S` seconds."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_S)
        if closing.is_alive():
            logger.warning("the last traces could not be exported within %g s", CLOSE_S)


class RequestSpan:
    """The open span of a request.

    Attributes:
        traceparent: W3C Trace Context, for requests that this process sends in turn.
    """

    def __init__(self, tracing: Tracing, span: Any, ahead_ns: int) -> None:
        its = span.get_span_context()
        self.traceparent = f"00-{its.trace_id:032x}-{its.span_id:016x}-{int(its.trace_flags):02x}"
        self._tracing, self._span, self._ahead_ns = tracing, span, ahead_ns

    def _date(self, at: float) -> int:
        return int(at * 1e9) + self._ahead_ns

    def end(
        self,
        timelines: Sequence[RequestTimeline],
        attributes: Mapping[str, Any],
        status: int,
        error: str,
    ) -> None:
        """Make all spans of the request and end its own. Never raises.

        Args:
            timelines: Timelines of its prompts.
            attributes: Attributes of the spans.
            status: HTTP status of the answer.
            error: Why the request failed; empty if it did not.
        """
        try:
            for timeline in timelines:
                self._show(timeline, attributes)
            self._span.set_attributes({**attributes, "http.response.status_code": status})
            if error:
                self._set_error(self._span, error)
            self._span.end(end_time=self._date(time.monotonic()))
        except Exception:
            logger.exception("a trace can't be made")

    def _set_error(self, span: Any, error: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, error))

    def _show(self, timeline: RequestTimeline, attributes: Mapping[str, Any]) -> None:
        """Make the spans of one prompt: those of nodes and, below them, of stages."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        root = set_span_in_context(self._span)
        stages, below = timeline.stages(), {}
        ended = timeline.ended or time.monotonic()
        for part in timeline.parts:
            if not part.node:  # this process: its stages belong to the root span
                continue
            mine = [stage for stage in stages if stage.part is part]
            times = [*part.marks.values(), *(at for s in mine for at in (s.start, s.end))]
            start = part.marks.get("asked", min(times))
            # The span of a node that generates lasts until the end, others until their last mark.
            generates = part.part in ("target", "alone", "successor") and "failed" not in part.marks
            span = self._tracing.tracer_of(part).start_span(
                "llm_request",
                context=root,
                kind=SpanKind.SERVER,
                start_time=self._date(start),
                attributes={
                    **attributes,
                    "kvbaton.node": part.node,
                    "kvbaton.part": part.part,
                    "kvbaton.attempt": part.attempt,
                },
            )
            for name in EVENTS:
                if name in part.marks:
                    span.add_event(name, timestamp=self._date(part.marks[name]))
            if "failed" in part.marks:
                self._set_error(span, "the node failed, refused or was lost")
            below[id(part)] = set_span_in_context(span)
            span.end(end_time=self._date(max(ended if generates else start, *times)))
        for stage in stages:
            context = root if stage.part is None else below.get(id(stage.part), root)
            span = self._tracing.tracer_of(stage.part).start_span(
                stage.name,
                context=context,
                start_time=self._date(stage.start),
                attributes={"kvbaton.critical_path": list(stage.paths)} if stage.paths else {},
            )
            span.end(end_time=self._date(stage.end))


class TimedRequest:
    """Times the prompts of a request that is traced, or whose client wants the timings.

    Args:
        tracing: Traces of this process; None for none.
        request: The client's HTTP request.
        asks: Requests to the source.
        wanted: Whether the client asks for its timings.
        role: See `RequestTimeline`; None takes the role that the request itself has.
        attributes: Attributes of the request's span.

    Attributes:
        asks: Requests to the source, one per prompt.
        timelines: Timelines of the prompts, each None if the request is not timed.
        status: HTTP status of the answer.
        error: Why the request failed; empty if it did not.
    """

    def __init__(
        self,
        tracing: Tracing | None,
        request: web.Request,
        asks: Sequence[AddRequest],
        *,
        wanted: bool = False,
        role: str | None = None,
        attributes: Mapping[str, Any],
    ) -> None:
        self.asks, self.timelines = asks, list[RequestTimeline | None]([None] * len(asks))
        self.status, self.error = 200, ""
        self._attributes = attributes
        span = self._span = None if tracing is None else tracing.start(request)
        if span is not None or wanted:
            traceparent = "" if span is None else span.traceparent
            self.asks = [replace(ask, timed=True, traceparent=traceparent) for ask in asks]
            own = ("alone" if ask.transfer is None else ask.transfer.role for ask in asks)
            self.timelines = [RequestTimeline(request[ARRIVED], role or part) for part in own]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        now, timelines = time.monotonic(), [*filter(None, self.timelines)]
        for timeline in timelines:
            timeline.ended = now
        if self._span is None:
            return
        if error is not None:
            self.status, self.error = _status(error), f"{type(error).__name__}: {error}"
        attributes = {**self._attributes, **self._figures(timelines)}
        shown = self.error if self.status >= 500 or self.status == 200 else ""
        self._span.end(timelines, attributes, self.status, shown)

    def _figures(self, timelines: Sequence[RequestTimeline]) -> dict[str, Any]:
        """Attributes by the names of vLLM and of OpenTelemetry's conventions; times in seconds."""
        params = self.asks[0].params
        prompt = sum(len(ask.token_ids) for ask in self.asks)
        generated = sum(timeline.num_written for timeline in timelines)
        timeline = timelines[0]
        figures = {
            "gen_ai.request.id": self.asks[0].request_id,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
            "gen_ai.usage.num_sequences": params.n * len(self.asks),
            "gen_ai.usage.prompt_tokens": prompt,
            "gen_ai.usage.input_tokens": prompt,
            "gen_ai.usage.completion_tokens": generated,
            "gen_ai.usage.output_tokens": generated,
            "gen_ai.latency.e2e": time.monotonic() - timeline.arrived,
        }
        path = timeline.path("first_token")
        if path:
            figures["gen_ai.latency.time_to_first_token"] = path[-1].end - path[0].start
        named = {"queue": "time_in_queue", "prefill": "time_in_model_prefill"}
        for stage in path:
            if stage.name in named:
                figures[f"gen_ai.latency.{named[stage.name]}"] = stage.end - stage.start
        return figures


def _status(error: BaseException) -> int:
    """HTTP status of the answer for an exception."""
    match error:
        case RequestError():
            return error.status
        case EngineDeadError():
            return 503
        case TimeoutError():
            return 504
        case asyncio.CancelledError():
            return CLIENT_CLOSED_REQUEST
    return 500
