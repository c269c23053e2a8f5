"""``GET /openapi.json``: a description of the endpoint, made from its routes and types.

Source: OpenAPI 3.1; its schemas are JSON Schema 2020-12, which msgspec makes from our structs.
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
    """Decorator that notes the types of a handler's bodies; without it they are any JSON object.

    Attributes:
        body: Type of the request's body.
        answer: Type of the answer with status 200.
        streams: Whether the answer may be server-sent events of JSON instead.
        content_type: Content type of the answer.
        error: Type of the answer with any other status.
    """

    body: type[Struct] | None = None
    answer: type[Struct] | None = None
    streams: bool = False
    content_type: str = "application/json"
    error: type[Struct] = ErrorBody

    def __call__(self, handler: H) -> H:
        """Note the types of a handler for the description, and return the handler."""
        _contracts[handler] = self
        return handler


_contracts: dict[Callable[..., Any], contract] = {}


async def openapi(request: web.Request) -> web.Response:
    """OpenAPI description of this server."""
    return json_response(describe(request.app))


def describe(app: web.Application) -> dict[str, Any]:
    """Make the OpenAPI document of an application's routes."""
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
        for schema in schemas.values():  # the shared types leave the type of this field open
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
        content["text/event-stream"] = {}  # a schema is ambiguous: of each event, or of the stream
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
