"""``GET /openapi.json``: the endpoint described by its own routes and types.

Source: OpenAPI 3.1; its schemas are JSON Schema 2020-12, which msgspec makes of our structs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.web_urldispatcher import AbstractRoute
from msgspec import Struct

from kvbaton.messages.openai import ErrorBody
from kvbaton.server.bodies import json_response
from kvbaton.server.frontend import FRONTEND
from kvbaton.version import __version__

H = TypeVar("H", bound=Callable[..., Any])

REF = "#/components/schemas/{name}"
_VARIABLE = re.compile(r"{(\w+)(?::[^}]*)?}")


@dataclass(frozen=True, kw_only=True)
class contract:
    """Notes what a handler takes and answers, beyond JSON objects of any shape.

    Attributes:
        body: of a request.
        answer: of status 200.
        streams: whether it may answer with server-sent events of JSON instead.
        content_type: of an answer that is no JSON.
        error: of any other status.
    """

    body: type[Struct] | None = None
    answer: type[Struct] | None = None
    streams: bool = False
    content_type: str = "application/json"
    error: type[Struct] = ErrorBody

    def __call__(self, handler: H) -> H:
        """Note it, for the description."""
        _contracts[handler] = self
        return handler


_contracts: dict[Callable[..., Any], contract] = {}


async def openapi(request: web.Request) -> web.Response:
    """This description."""
    return json_response(describe(request.app))


def describe(app: web.Application) -> dict[str, Any]:
    """An application's routes as an OpenAPI document."""
    frontend = app[FRONTEND]
    routes = [route for route in app.router.routes() if route.method != "HEAD"]
    named = [_contracts.get(inspect.unwrap(route.handler), contract()) for route in routes]
    types = {t for c in named for t in (c.body, c.answer, c.error) if t is not None}
    transfer = frontend.transfer_type
    if transfer is not None:
        types.add(transfer)
    ordered = sorted(types, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template=REF)
    if transfer is not None:
        for schema in schemas.values():  # the shared types leave open what this field holds
            if "kv_transfer_params" in schema.get("properties", {}):
                choice = [_ref(transfer), {"type": "null"}]
                schema["properties"]["kv_transfer_params"] = {"anyOf": choice}
    paths: dict[str, Any] = {}
    for route, found in zip(routes, named, strict=True):
        paths.setdefault(_path(route), {})[route.method.lower()] = _operation(route, found)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "kvbaton", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if frontend.config.api_keys:
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
        document["security"] = [{"key": []}, {"x-api-key": []}]
    return document


def _path(route: AbstractRoute) -> str:
    assert route.resource is not None
    return _VARIABLE.sub(r"{\1}", route.resource.canonical)


def _operation(route: AbstractRoute, found: contract) -> dict[str, Any]:
    content = {found.content_type: {"schema": _ref(found.answer)}}
    if found.streams:
        content["text/event-stream"] = {}  # readers of a schema apply it to each event, or to all
    error = {"application/json": {"schema": _ref(found.error)}}
    operation: dict[str, Any] = {
        "summary": (route.handler.__doc__ or "").partition("\n")[0],
        "responses": {
            "200": {"description": "the answer", "content": content},
            "default": {"description": "what went wrong", "content": error},
        },
    }
    if found.body is not None:
        taken = {"application/json": {"schema": _ref(found.body)}}
        operation["requestBody"] = {"required": True, "content": taken}
    if names := _VARIABLE.findall(_path(route)):
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": schema} for name in names
        ]
    return operation


def _ref(kind: type | None) -> dict[str, Any]:
    return {} if kind is None else {"$ref": REF.format(name=kind.__name__)}
