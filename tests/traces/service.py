"""The work of the traced processes. The first process of each key is killed in the middle."""

import json
import os
import signal
import sys
from pathlib import Path

from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.urls import path
from opentelemetry import trace

from idempotency.decorators import idempotent
from idempotency.jobs import stage_job
from idempotency.phases import atomic_phase
from tests import operations
from tests.processes.service import JOB, leave_entry


def die_once() -> None:
    """Kill this process, unless the file exists that the killed process leaves."""
    mark = Path(os.environ["TEST_MARK"])
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@idempotent(recovery_points=["half_done"], scope=lambda request: "everybody")
def order(request: HttpRequest) -> HttpResponseBase:
    """Leave a row, call a service, and stage a job that leaves the second row."""
    key = request.idempotency_key
    for recovery_point in key.phases():
        if recovery_point == "started":
            with atomic_phase(key) as phase:
                leave_entry("row")
                phase.set_recovery_point("half_done")
        else:
            with key.call("bank"):
                die_once()
            with atomic_phase(key) as phase:
                stage_job(JOB, {"name": "job"})
                phase.set_response(JsonResponse({}, status=201))
    return key.response()


urlpatterns = [path("order", order)]


def main() -> None:
    """Send the request, or call the operation, in the span of a server."""
    from django.test import Client

    with trace.get_tracer(__name__).start_as_current_span("server"):
        if sys.argv[1] == "view":
            answer = Client().post("/order", headers={"Idempotency-Key": "key"})
            json.dump([answer.status_code, answer.get("Idempotent-Replayed")], sys.stdout)
        else:
            operations.bank.before = die_once
            json.dump(operations.pay.once("key", name="one", cents=9), sys.stdout)
