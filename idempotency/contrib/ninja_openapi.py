"""Django Ninja's OpenAPI document with the policies of protected operations: use this ``NinjaAPI``
instead of ``ninja.NinjaAPI``."""

from typing import Any

import ninja
from ninja.openapi import schema
from ninja.operation import Operation

from idempotency._http.responses import SAFE_METHODS
from idempotency.contrib.openapi import PROBLEM, PROBLEM_SCHEMA, describe
from idempotency.policy import Protected, policy_of


class OpenAPISchema(schema.OpenAPISchema):
    """The OpenAPI document of an API with the policies of its operations."""

    def operation_details(self, operation: Operation) -> dict[str, Any]:
        details: dict[str, Any] = super().operation_details(operation)
        options = getattr(operation.view_func, "idempotency", None)
        unsafe = tuple(method for method in operation.methods if method not in SAFE_METHODS)
        if options is not None and unsafe:
            describe(
                details,
                policy_of(Protected(callback=operation.view_func, options=options, methods=unsafe)),
            )
            self.schemas[PROBLEM] = PROBLEM_SCHEMA
        return details


def openapi_schema(api: ninja.NinjaAPI, path_prefix: str | None = None) -> OpenAPISchema:
    """Return the document of ``api``, for a custom ``NinjaAPI.get_openapi_schema()``."""
    return OpenAPISchema(api, api.get_root_path({}) if path_prefix is None else path_prefix)


class NinjaAPI(ninja.NinjaAPI):
    """A NinjaAPI whose document has the policies of its operations."""

    def get_openapi_schema(
        self, *, path_prefix: str | None = None, path_params: dict[str, Any] | None = None
    ) -> schema.OpenAPISchema:
        """Return the document; ``path_params`` are those of the mount point of the API."""
        return openapi_schema(
            self, self.get_root_path(path_params or {}) if path_prefix is None else path_prefix
        )
