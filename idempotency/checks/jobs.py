"""System check of the modules of jobs."""

from typing import Any

from django.apps import apps
from django.core.checks import CheckMessage, Warning, register

from idempotency import conf, jobs


@register(deploy=True)
def check_job_modules(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """W019: JOB_MODULES permits functions that were not written as jobs."""
    if not conf.are_valid() or not (
        wide := [root for root in conf.get().JOB_MODULES or () if _is_wide(root)]
    ):
        return []
    return [
        Warning(
            "The setting JOB_MODULES of IDEMPOTENCY permits more than modules of jobs:"
            f" {', '.join(wide)}. A row that is written into the table of staged jobs can run any"
            " function there.",
            hint=(
                "List the modules that define your jobs, such as 'shop.jobs', or remove the"
                " setting."
            ),
            id="idempotency.W019",
        )
    ]


def _is_wide(root: str) -> bool:
    """Return whether this is not a module of jobs, nor another module inside an app of the
    project."""
    parts, installed = root.split("."), [app.name for app in apps.get_app_configs()]
    if parts[0] in ("django", "idempotency"):
        return True
    return jobs.JOB_NAMES.isdisjoint(parts) and not any(
        root.startswith(f"{name}.") for name in installed
    )
