"""Views whose runs hang, for the processes of ``test_hangs.py``. The first attempt, that of the
client, fails."""

import threading

from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.urls import path

from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase

#: Longer than any test.
NEVER_SECONDS = 3600
#: Longer than the watchdog waits for a cancelled query, and shorter than the limit of a run with
#: the lease of the test.
SLOW_SECONDS = 6.5


def wait_for_the_provider(seconds: float) -> None:
    """Wait like a client of a provider that has no timeout."""
    threading.Event().wait(seconds)


def behave(word: str) -> None:
    """Do what the first word of a key says."""
    match word:
        case "hang":
            wait_for_the_provider(NEVER_SECONDS)
        case "query":
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_sleep(%s)", [NEVER_SECONDS])
        case "locked":  # The transaction has locked the row of the key itself.
            with transaction.atomic():
                list(IdempotencyKey.objects.select_for_update())
                behave("query")


def undo(key: IdempotencyKey) -> HttpResponseBase:
    """Settle an overdue key."""
    behave(key.idempotency_key.partition("-")[0])
    return HttpResponse(status=410)


@idempotent(recovery_points=["called"], scope=lambda request: "all", on_abandon=undo)
def with_undo(request: HttpRequest) -> HttpResponseBase:
    """Never finish."""
    return HttpResponse(status=503)


@idempotent(recovery_points=["called"], scope=lambda request: "all")
def work(request: HttpRequest) -> HttpResponseBase:
    """Make an at-most-once call in the first phase, and finish in the second."""
    key = request.idempotency_key
    word = key.idempotency_key.partition("-")[0]
    for recovery_point in key.phases():
        if key.attempts == 1:
            return HttpResponse(status=503)
        if recovery_point == "started":
            behave(word)
            with key.call("sms", at_most_once=True) as call:
                if call.due:
                    wait_for_the_provider(SLOW_SECONDS if word == "slow" else 0)
                    call.record(True)
            with atomic_phase(key) as phase:
                phase.set_recovery_point("called")
        else:
            with atomic_phase(key) as phase:
                phase.set_response(JsonResponse({}, status=201))
    return key.response()


urlpatterns = [path("view/", work), path("undo/", with_undo)]
