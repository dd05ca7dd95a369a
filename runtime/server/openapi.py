"""The description at `/openapi.json`: FastAPI's own, with the served model's name, the errors and the API key."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from runtime.server.response_models import ErrorResponse

Responses = dict[int | str, dict[str, Any]]


def _errors(**descriptions: str) -> Responses:
    """Error answers by status, given as `status_404="..."`."""
    return {
        int(name.removeprefix("status_")): {"model": ErrorResponse, "description": text}
        for name, text in descriptions.items()
    }


ANY_ERRORS = _errors(
    status_403="Asked by a page of another site, or under a foreign host name",
    status_500="The server failed",
)
"""Errors of every route."""
KEY_ERRORS = _errors(status_401="Missing or incorrect API key")
PARAMETER_ERRORS = _errors(status_404="Not found")
BODY_ERRORS = _errors(
    status_400="The body is invalid; `param` names the field",
    status_404="Another model is served",
    status_408="The body was not complete in time",
    status_413="The body is too long",
    status_429="The queue is full",
    status_503="The server is stopping, or the request got no token in time",
    status_504="The request took too long",
)
UNUSED = ("HTTPValidationError", "ValidationError")
"""Schemas of FastAPI's own answer 422, which this server never sends."""


class DescribedApi(FastAPI):
    """A FastAPI application whose description holds for the served model.

    Args:
        model_name: the one model that requests may name.
        needs_key: whether requests must carry an API key.
        open_paths: paths that need no key all the same.
    """

    def __init__(self, *, model_name: str, needs_key: bool, open_paths: tuple[str, ...], **options: Any) -> None:
        super().__init__(**options)
        self.model_name, self.needs_key, self.open_paths = model_name, needs_key, open_paths

    def openapi(self) -> dict[str, Any]:
        """Generates the description once."""
        if not self.openapi_schema:
            self.openapi_schema = self._completed(super().openapi())
        return self.openapi_schema

    def _completed(self, description: dict[str, Any]) -> dict[str, Any]:
        components = description.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for name in UNUSED:
            schemas.pop(name, None)
        for schema in schemas.values():
            name_model(schema, self.model_name)
            write_whole_bounds(schema)
        if self.needs_key:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, item in description["paths"].items():
            for operation in item.values():
                operation["responses"].pop("422", None)
                asks_for_key = self.needs_key and path not in self.open_paths
                if asks_for_key:
                    operation["security"] = [{"key": []}]
                operation["responses"].update(_described(ANY_ERRORS | (KEY_ERRORS if asks_for_key else {})))
        return description


def _described(errors: Responses) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/ErrorResponse"}
    return {
        str(status): {"description": each["description"], "content": {"application/json": {"schema": schema}}}
        for status, each in errors.items()
    }


def name_model(schema: dict[str, Any], model_name: str) -> None:
    """Restricts the field `model` of a request to the served model."""
    field = schema.get("properties", {}).get("model", {})
    for choice in (field, *field.get("anyOf", ())):
        if choice.get("type") == "string":
            choice["enum"] = [model_name]


def write_whole_bounds(schema: Any) -> None:
    """Writes bounds of integers as integers: FastAPI turns them into floats, which cannot hold all of them."""
    children = schema if isinstance(schema, list) else schema.values() if isinstance(schema, dict) else ()
    for child in children:
        write_whole_bounds(child)
    if isinstance(schema, dict) and schema.get("type") == "integer":
        schema.update({name: int(value) for name, value in schema.items() if isinstance(value, float)})
