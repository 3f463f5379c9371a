"""The service of the lab: a plain view, a phased view that calls the provider, and a job that calls
it too."""

import os
import urllib.request
import uuid

from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.urls import path

from idempotency.decorators import idempotent
from idempotency.jobs import stage_job
from idempotency.models import StagedJob
from idempotency.phases import atomic_phase
from tests.models import Entry

PROVIDER_SECONDS = 10
JOB = "tests.failover.service.hand_over"


def everybody(request: HttpRequest) -> str:
    """Return the common scope of all clients."""
    return "everybody"


def call_provider(downstream_key: str, text: str) -> str:
    """Let the provider do its work once for this key; return its response, which is the same for
    each retry."""
    request = urllib.request.Request(
        os.environ["FAILOVER_PROVIDER"],
        text.encode(),
        {"Idempotency-Key": downstream_key},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=PROVIDER_SECONDS) as answer:
        return str(answer.read().decode())


@idempotent(scope=everybody)
def plain(request: HttpRequest) -> HttpResponseBase:
    """Create one row. A second run would return another response."""
    Entry.objects.create(name=request.idempotency_key.idempotency_key)
    return JsonResponse({"run": uuid.uuid4().hex}, status=201)


@idempotent(recovery_points=["ordered"], scope=everybody)
def phased(request: HttpRequest) -> HttpResponseBase:
    """Create one row, let the provider charge, and stage a job."""
    key = request.idempotency_key
    client_key = key.idempotency_key
    for recovery_point in key.phases():
        if recovery_point == "started":
            with atomic_phase(key) as phase:
                Entry.objects.create(name=client_key)
                phase.set_recovery_point("ordered")
        else:
            charge = call_provider(key.derive("charge"), f"charge {client_key}")
            with atomic_phase(key) as phase:
                stage_job(JOB, {"client_key": client_key})
                phase.set_response(JsonResponse({"charge": charge}, status=201))
    return key.response()


def hand_over(job: StagedJob) -> None:
    """Take a staged job from the enqueuer: the provider sends a receipt, once for each job."""
    call_provider(str(job.pk), f"receipt {job.job_args['client_key']}")


urlpatterns = [path("plain/", plain), path("phased/", phased)]
