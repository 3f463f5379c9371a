"""drf-spectacular: ``REST_FRAMEWORK = {"DEFAULT_SCHEMA_CLASS":
"idempotency.contrib.spectacular.AutoSchema"}``."""

from types import SimpleNamespace
from typing import Any

from drf_spectacular import openapi
from drf_spectacular.plumbing import ResolvedComponent

from idempotency._http.responses import SAFE_METHODS
from idempotency._http.routes import options_of
from idempotency.contrib.openapi import PROBLEM, PROBLEM_SCHEMA, describe
from idempotency.policy import Protected, policy_of


class AutoSchema(openapi.AutoSchema):
    """The schema of a view with its policy.

    It reads the options of ``@idempotent`` on a method of an APIView, a handler of a generic view
    (``create``), an action of a view set and a function below ``@api_view``. A custom schema class
    must inherit from this class.
    """

    def get_operation(
        self, path: str, path_regex: str, path_prefix: str, method: str, registry: Any
    ) -> dict[str, Any] | None:
        operation: dict[str, Any] | None = super().get_operation(
            path, path_regex, path_prefix, method, registry
        )
        # Only these attributes of a resolved view are needed.
        callback: Any = SimpleNamespace(
            cls=type(self.view), actions=getattr(self.view, "action_map", None)
        )
        options = options_of(callback, method)
        if operation is None or options is None or method.upper() in SAFE_METHODS:
            return operation
        describe(
            operation,
            policy_of(Protected(callback=callback, options=options, methods=(method.upper(),))),
        )
        problem = ResolvedComponent(  # type: ignore[no-untyped-call]
            name=PROBLEM, type=ResolvedComponent.SCHEMA, schema=PROBLEM_SCHEMA, object=PROBLEM
        )
        registry.register_on_missing(problem)
        return operation
