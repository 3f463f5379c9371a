"""System checks of the jobs that the code stages under a literal name, and of the modules of jobs."""

import ast
import sys
from collections.abc import Iterator
from inspect import getsource
from types import ModuleType
from typing import Any, NamedTuple

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Warning, register
from django.urls import get_resolver

from idempotency import conf, jobs
from idempotency._hand_over import backend_of

_FUNCTIONS = (jobs.stage_job, jobs.astage_job)


class _Call(NamedTuple):
    """A call of ``stage_job`` or ``astage_job`` whose name and queue are literals."""

    place: str
    name: str
    queue: str


@register
def check_staged_names(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """W013: ``stage_job`` is called with a name that its queue refuses.

    The check covers calls with a literal name and queue, in modules that are imported: those of the URLconf, and those that
    other checks, the models and the apps import. It skips tests, because they may stage wrong names on purpose.
    """
    if not conf.are_valid():
        return []
    if getattr(settings, "ROOT_URLCONF", None):
        _ = get_resolver().url_patterns  # Imports the views.
    return [
        Warning(
            f"{call.place} stages the job {call.name!r} on the queue {call.queue!r}, which refuses it: {problem}",
            hint="Correct the name or the setting, or use another queue. The job would stay staged with this error.",
            id="idempotency.W013",
        )
        for module in list(sys.modules.values())
        for call in _calls(module)
        if (problem := _refusal(call))
    ]


@register(deploy=True)
def check_job_modules(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """W019: JOB_MODULES permits functions that were not written as jobs."""
    if not conf.are_valid() or not (wide := [root for root in conf.get().JOB_MODULES or () if _is_wide(root)]):
        return []
    return [
        Warning(
            f"The setting JOB_MODULES of IDEMPOTENCY permits more than modules of jobs: {', '.join(wide)}. A row that is "
            "written into the table of staged jobs can run any function there.",
            hint="List the modules that define your jobs, such as 'shop.jobs', or remove the setting.",
            id="idempotency.W019",
        )
    ]


def _is_wide(root: str) -> bool:
    """Return whether this is not a module of jobs, nor another module inside an app of the project."""
    parts, installed = root.split("."), [app.name for app in apps.get_app_configs()]
    if parts[0] in ("django", "idempotency"):
        return True
    return jobs.JOB_NAMES.isdisjoint(parts) and not any(root.startswith(f"{name}.") for name in installed)


def _calls(module: ModuleType) -> Iterator[_Call]:
    # Compare by identity, because a value may define its own ``==``.
    known = {id(jobs), *map(id, _FUNCTIONS), id(sys.modules["idempotency"])}
    if not any(id(value) in known for value in list(getattr(module, "__dict__", {}).values())):
        return
    if module.__name__.startswith("idempotency.") or _is_test(module.__name__):
        return
    try:
        tree = ast.parse(getsource(module))
    except (OSError, SyntaxError, TypeError):  # The source is missing or cannot be parsed.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(_value(node.func, module)) in map(id, _FUNCTIONS):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            name = _text(node.args[0] if node.args else given.get("name"))
            queue = _text(given.get("queue", ast.Constant("default")))
            if name and queue and None not in given:
                yield _Call(f"{module.__file__}:{node.lineno}", name, queue)


def _value(node: ast.expr, module: ModuleType) -> Any:
    """Return the object to which a name or an attribute in ``module`` refers; None if it is unknown."""
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, module)
        return vars(owner).get(node.attr) if isinstance(owner, ModuleType) else None
    return vars(module).get(node.id) if isinstance(node, ast.Name) else None


def _text(node: ast.expr | None) -> str:
    """Return the value of a string literal, or "" for any other expression."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _is_test(module: str) -> bool:
    return any(part.startswith("test") or part == "conftest" for part in module.split("."))


def _refusal(call: _Call) -> str:
    try:
        backend = backend_of(call.queue)
    except Exception as error:
        if "ENQUEUERS" in getattr(settings, "IDEMPOTENCY", {}):
            return ""  # reported by E003
        return f"the default backend, RQ, cannot be used ({error}). Install it, or set IDEMPOTENCY['ENQUEUERS']"
    refuse = jobs.function_of if getattr(backend, "runs_functions", False) else getattr(backend, "refuse_name", None)
    try:
        if refuse is not None:
            refuse(call.name)
    except Exception as error:  # The import of a module may raise any exception.
        return f"{error}"
    return ""
