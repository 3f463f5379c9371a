"""Views with one bug each, and the same views made right. The fakes of other systems are attributes
that a test replaces."""

import uuid
from types import SimpleNamespace
from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponseBase, JsonResponse

from idempotency.decorators import idempotent
from idempotency.jobs import stage_job
from idempotency.phases import atomic_phase
from tests.models import Account, Entry

#: What the views call; each test puts fakes of its own here.
systems: Any = SimpleNamespace()


def write(request: HttpRequest, name: str) -> Entry:
    """Write an entry of this request."""
    return Entry.objects.create(name=name, idempotency_key=request.idempotency_key)


# Right.


@idempotent
def plain(request: HttpRequest) -> HttpResponseBase:
    """Write rows and stage a job, in the one transaction of a plain view."""
    entry = write(request, "made")
    Account.objects.filter(name="till").update(balance=5)
    stage_job("tests.kit.jobs.anything", {"entry_id": entry.pk, "token": uuid.uuid4().hex})
    return JsonResponse({"id": entry.pk, "url": f"/entries/{entry.pk}"}, status=201)


@idempotent
def refusal(request: HttpRequest) -> HttpResponseBase:
    """Refuse for good: the refusal is stored."""
    return JsonResponse({"error": "no"}, status=409)


@idempotent(wait_seconds=0.5)
def patient(request: HttpRequest) -> HttpResponseBase:
    """Let duplicates wait."""
    return JsonResponse({"id": write(request, "made").pk}, status=201)


@idempotent
async def asynchronous(request: HttpRequest) -> HttpResponseBase:
    """Write through the async ORM."""
    entry = await Entry.objects.acreate(name="made")
    return JsonResponse({"id": entry.pk}, status=201)


@idempotent(recovery_points=["made", "charged"])
def phased(request: HttpRequest) -> HttpResponseBase:
    """Charge between two phases, with a derived key."""
    key = request.idempotency_key
    for recovery_point in key.phases():
        match recovery_point:
            case "started":
                with atomic_phase(key) as phase:
                    write(request, "made")
                    phase.set_recovery_point("made")
            case "made":
                charge = systems.charge(
                    amount=5, idempotency_key=key.derive("charge", valid_seconds=23 * 3600)
                )
                with atomic_phase(key) as phase:
                    Entry.objects.filter(idempotency_key=key).update(name=charge["id"])
                    phase.set_recovery_point("charged")
            case "charged":
                entry = Entry.objects.get(idempotency_key=key)
                with atomic_phase(key) as phase:
                    stage_job("tests.kit.jobs.anything", {"entry_id": entry.pk})
                    phase.set_response(
                        JsonResponse({"id": entry.pk, "charge": entry.name}, status=201)
                    )
    return key.response()


@idempotent(recovery_points=[])
def texting(request: HttpRequest) -> HttpResponseBase:
    """Text through a service that knows no keys."""
    key = request.idempotency_key
    for _ in key.phases():
        with key.call("text", at_most_once=True) as call:
            if call.due:
                call.record(systems.text("hello"))
        with atomic_phase(key) as phase:
            phase.set_response(JsonResponse({"sent": call.result}, status=201))
    return key.response()


# Wrong.


@idempotent(recovery_points=["made"])
def effect_outside_a_phase(request: HttpRequest) -> HttpResponseBase:
    """Write before the phase begins."""
    key = request.idempotency_key
    for recovery_point in key.phases():
        match recovery_point:
            case "started":
                Entry.objects.create(name="outside")
                with atomic_phase(key) as phase:
                    write(request, "made")
                    phase.set_recovery_point("made")
            case "made":
                with atomic_phase(key) as phase:
                    phase.set_response(JsonResponse({}, status=201))
    return key.response()


@idempotent(recovery_points=["unused"])
def missing_recovery_point(request: HttpRequest) -> HttpResponseBase:
    """Write in a phase that moves nothing."""
    key = request.idempotency_key
    for _ in key.phases():
        with atomic_phase(key) as phase:
            Entry.objects.create(name="made")
            phase.no_op()
        systems.charge(amount=5, idempotency_key=key.derive("charge"))
        with atomic_phase(key) as phase:
            phase.set_response(JsonResponse({}, status=201))
    return key.response()


@idempotent(recovery_points=["unused"])
def missing_recovery_point_of_a_unique_row(request: HttpRequest) -> HttpResponseBase:
    """Write a row that is unique, in a phase that moves nothing: the retry fails."""
    key = request.idempotency_key
    for _ in key.phases():
        with atomic_phase(key) as phase:
            write(request, "made")
            phase.no_op()
        with atomic_phase(key) as phase:
            phase.set_response(JsonResponse({}, status=201))
    return key.response()


@idempotent(recovery_points=["made"])
def unsafe_call(request: HttpRequest) -> HttpResponseBase:
    """Text outside ``key.call()``."""
    key = request.idempotency_key
    for recovery_point in key.phases():
        match recovery_point:
            case "started":
                with atomic_phase(key) as phase:
                    write(request, "made")
                    phase.set_recovery_point("made")
            case "made":
                systems.text("hello")
                with atomic_phase(key) as phase:
                    phase.set_response(JsonResponse({}, status=201))
    return key.response()


@idempotent
def call_in_a_plain_view(request: HttpRequest) -> HttpResponseBase:
    """Text inside the transaction of a plain view."""
    write(request, "made")
    systems.text("hello")
    return JsonResponse({}, status=201)


@idempotent(recovery_points=["made"])
def random_downstream_key(request: HttpRequest) -> HttpResponseBase:
    """Charge with a key of this run."""
    key = request.idempotency_key
    for recovery_point in key.phases():
        match recovery_point:
            case "started":
                with atomic_phase(key) as phase:
                    write(request, "made")
                    phase.set_recovery_point("made")
            case "made":
                systems.charge(amount=5, idempotency_key=str(uuid.uuid4()))
                with atomic_phase(key) as phase:
                    phase.set_response(JsonResponse({}, status=201))
    return key.response()


@idempotent(recovery_points=["made"])
def answer_from_a_variable(request: HttpRequest) -> HttpResponseBase:
    """Tell whether this very run wrote the entry."""
    key = request.idempotency_key
    new = False
    for recovery_point in key.phases():
        match recovery_point:
            case "started":
                with atomic_phase(key) as phase:
                    write(request, "made")
                    phase.set_recovery_point("made")
                new = True
            case "made":
                with atomic_phase(key) as phase:
                    phase.set_response(JsonResponse({"new": new}, status=201))
    return key.response()


@idempotent(recovery_points=["made"])
def answer_from_a_random_value(request: HttpRequest) -> HttpResponseBase:
    """Write a random number down, and answer with that of the run that answers."""
    key = request.idempotency_key
    number = uuid.uuid4().hex
    for recovery_point in key.phases():
        match recovery_point:
            case "started":
                with atomic_phase(key) as phase:
                    write(request, number)
                    phase.set_recovery_point("made")
            case "made":
                with atomic_phase(key) as phase:
                    phase.set_response(JsonResponse({"number": number}, status=201))
    return key.response()


@idempotent(recovery_points=["made"])
def variable_of_an_earlier_run(request: HttpRequest) -> HttpResponseBase:
    """Use at the second point what the first one left in a variable."""
    key = request.idempotency_key
    for recovery_point in key.phases():
        match recovery_point:
            case "started":
                with atomic_phase(key) as phase:
                    entry = write(request, "made")
                    phase.set_recovery_point("made")
            case "made":
                with atomic_phase(key) as phase:
                    phase.set_response(JsonResponse({"id": entry.pk}, status=201))
    return key.response()


@idempotent(recovery_points=[])
def effect_after_commit(request: HttpRequest) -> HttpResponseBase:
    """Text when everything is committed: it is lost with the process."""
    key = request.idempotency_key
    for _ in key.phases():
        with atomic_phase(key) as phase:
            write(request, "made")
            transaction.on_commit(lambda: systems.text("hello"))
            phase.set_response(JsonResponse({}, status=201))
    return key.response()


@idempotent(recovery_points=["charged"])
def charge_after_the_point(request: HttpRequest) -> HttpResponseBase:
    """Move the recovery point before the call that it stands for."""
    key = request.idempotency_key
    for recovery_point in key.phases():
        match recovery_point:
            case "started":
                with atomic_phase(key) as phase:
                    write(request, "made")
                    phase.set_recovery_point("charged")
                systems.charge(amount=5, idempotency_key=key.derive("charge"))
            case "charged":
                with atomic_phase(key) as phase:
                    phase.set_response(JsonResponse({}, status=201))
    return key.response()


@idempotent
def tidies_up(request: HttpRequest) -> HttpResponseBase:
    """Tidy up in ``except`` and ``finally``: a dead process does not."""
    try:
        write(request, "made")
        systems.charge(amount=5, idempotency_key="always the same")
    except BaseException:
        systems.text("never mind")
        Entry.objects.create(name="failed")
    finally:
        Account.objects.filter(name="till").update(balance=1)
    return JsonResponse({}, status=201)
