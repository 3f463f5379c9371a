"""Two protected views, and a broker that prints the jobs that it receives."""

from django.db import connection
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.urls import path

from idempotency.decorators import idempotent
from idempotency.jobs import stage_job
from idempotency.models import StagedJob
from idempotency.phases import atomic_phase
from tests.citus.tenants_project.shop.models import Order


def everybody(request: HttpRequest) -> str:
    return "everybody"


def job(tenant: str) -> None:
    """Do nothing; the broker does not run it."""


def hand_over(staged: StagedJob) -> None:
    """Print the job and its tenant."""
    print(f"{connection.schema_name}: job of {staged.job_args['tenant']}", flush=True)  # noqa: T201 - the test reads it


def _answer(order: Order) -> JsonResponse:
    return JsonResponse({"order": order.pk, "tenant": connection.schema_name}, status=201)


@idempotent(scope=everybody)
def plain(request: HttpRequest) -> HttpResponseBase:
    """Create an order and stage a job."""
    stage_job(f"{__name__}.job", {"tenant": connection.schema_name})
    return _answer(Order.objects.create(name="plain"))


@idempotent(recovery_points=[], scope=everybody)
def phased(request: HttpRequest) -> HttpResponseBase:
    """Create an order in a phase; fail before it if the header X-Fail is set, which the completer
    does not send."""
    key = request.idempotency_key
    for _ in key.phases():
        if "X-Fail" in request.headers:
            raise ValueError("on purpose")
        with atomic_phase(key) as phase:
            phase.set_response(_answer(Order.objects.create(name="phased", idempotency_key=key)))
    return key.response()


urlpatterns = [path("plain/", plain), path("phased/", phased)]
