"""After COMMIT: callbacks run only for committed work, and an error changes neither the stored
response nor the key."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from pytest_django import Settings

from idempotency.decorators import idempotent
from idempotency.exceptions import CONFLICTS
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.kit.serving import Sender
from tests.kit.views import both_kinds, create, over_key, phased, plain, two_phases
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)

Serve = Callable[..., None]


def _broken_hook() -> None:
    raise ConnectionError("the broker is down")


@pytest.mark.postgres
def test_a_hook_that_fails_after_commit_does_not_replace_the_stored_answer(
    serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"STORE_5XX": True}

    def work(request: HttpRequest) -> HttpResponse:
        transaction.on_commit(_broken_hook)
        return create(request)

    serve(view=phased(work))
    assert sender.send().status_code == 500
    assert Entry.objects.count() == 1
    assert IdempotencyKey.objects.get().response_code == 201
    assert sender.send().status_code == 201


def test_a_hook_that_fails_after_a_plain_view_raises_its_own_error(
    serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        transaction.on_commit(_broken_hook)
        return create(request)

    serve(view=plain(work))
    sender.client.raise_request_exception = True
    with pytest.raises(ConnectionError, match="the broker is down"):
        sender.send()
    assert sender.send().status_code == 201


@pytest.mark.parametrize("conflict", CONFLICTS)
def test_a_conflict_of_another_key_in_a_hook_is_not_told_of_this_key(
    serve: Serve, sender: Sender, conflict: type[Exception]
) -> None:
    """A client that is told to use a new key would repeat what is committed."""

    def hook() -> None:
        raise conflict

    def work(request: HttpRequest) -> HttpResponse:
        transaction.on_commit(hook)
        return create(request)

    serve(view=plain(work))
    assert [sender.send().status_code for _ in range(2)] == [500, 201]


@pytest.mark.postgres
def test_a_hook_that_fails_after_the_first_phase_does_not_finish_the_key(
    serve: Serve, sender: Sender, settings: Settings
) -> None:
    """The error is a 404 instead of a 500, so that the test does not depend on STORE_5XX."""

    def lost() -> None:
        raise Http404

    def first(request: HttpRequest) -> None:
        Entry.objects.create(name="charged")
        transaction.on_commit(lost)

    serve(view=two_phases(first, lambda request: HttpResponse(status=201)))
    assert [sender.send().status_code for _ in range(2)] == [500, 201]
    assert Entry.objects.count() == 1


def test_a_phase_is_known_to_be_committed_before_a_hook_fails(serve: Any, sender: Sender) -> None:
    """The view handles the error, and the client still gets the stored response."""

    def fail() -> None:
        raise OSError

    def body(key: IdempotencyKey) -> None:
        with pytest.raises(OSError), atomic_phase(key) as phase:  # noqa: PT012 - the hook's
            transaction.on_commit(fail)
            phase.set_response(HttpResponse("stored"))

    serve(view=over_key(body))
    assert sender.send().content == b"stored"
    assert IdempotencyKey.objects.get().attempts == 1


@pytest.mark.postgres
def test_an_error_after_commit_that_the_view_turns_into_an_answer_does_not_replace_the_stored_one(
    serve: Serve, sender: Sender
) -> None:
    """For the view, a connection that is cut between COMMIT and its acknowledgement is the same
    error."""

    @idempotent(recovery_points=["unused"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            try:
                with atomic_phase(key) as phase:
                    Entry.objects.create(name="paid")
                    transaction.on_commit(_broken_hook)
                    phase.set_response(HttpResponse(status=201))
            except Exception:
                return JsonResponse({"error": "could not be booked"}, status=422)
        return key.response()

    serve(view=view)
    sender.send()
    assert Entry.objects.count() == 1
    assert sender.send().status_code == 201


def test_an_error_after_the_end_is_not_taken_for_a_takeover(
    serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    @idempotent(recovery_points=["unused"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse(status=201))
        raise RuntimeError("on purpose")

    serve(view=view)
    with caplog.at_level("INFO", "idempotency"):
        sender.send()
    assert "taken over" not in caplog.text
    assert sender.send().status_code == 201


@both_kinds
@pytest.mark.postgres
def test_hooks_of_what_was_rolled_back_do_not_run(kind: Any, serve: Serve, sender: Sender) -> None:
    ran = []

    def work(request: HttpRequest) -> HttpResponse:
        transaction.on_commit(lambda: ran.append(1))
        from idempotency.http import not_stored

        if kind is phased:
            raise OSError
        return not_stored(HttpResponse(status=201))

    serve(view=kind(work))
    assert sender.send().status_code == (500 if kind is phased else 201)
    assert ran == []
