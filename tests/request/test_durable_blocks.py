"""Code that commits by itself, or closes the connection, in the transaction of a plain view or a
phase."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from django.db import close_old_connections, connection, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect

from idempotency.models import IdempotencyKey
from idempotency.phases import AtMostOnceCall
from tests.kit.serving import Sender, View
from tests.kit.views import both_kinds, create, in_transaction, plain, texting, two_phases
from tests.kit.waiting import eventually
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]

#: What the error must name: this app, and the two ways out.
NAMES = r"(?s)@idempotent.*recovery_points.*at_most_once"


def durable() -> None:
    """Do work that must be committed at its end."""
    with transaction.atomic(durable=True):
        Entry.objects.create(name="old code")


def closing() -> None:
    """Do work, and leave the connection to the next user, as code of a loop does."""
    Entry.objects.create(name="old code")
    close_old_connections()


def closing_in_a_block() -> None:
    with transaction.atomic():
        connection.close()


old_codes = pytest.mark.parametrize("old_code", [durable, closing, closing_in_a_block])


@old_codes
@both_kinds
def test_the_error_names_the_decorator_and_the_ways_out(
    kind: Kind, old_code: Callable[[], None], serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponseBase:
        old_code()
        return create(request)

    serve(view=kind(work))
    sender.client.raise_request_exception = True
    with pytest.raises(RuntimeError, match=NAMES):
        sender.send()
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.finished().exists()


def hidden(
    old_code: Callable[[], None], end: Callable[[], HttpResponseBase]
) -> Callable[[HttpRequest], HttpResponseBase]:
    """Return work that catches each error, and then ends without the database."""

    def work(request: HttpRequest) -> HttpResponseBase:
        try:
            old_code()
            create(request)
        except Exception:
            return end()
        return HttpResponse(status=201)

    return work


def missing() -> HttpResponseBase:
    raise Http404


ENDS: dict[str, Callable[[], HttpResponseBase]] = {
    "redirect": partial(HttpResponseRedirect, "/"),
    "400": partial(HttpResponse, status=400),
    "404 raised": missing,
}


@old_codes
@both_kinds
@pytest.mark.parametrize("end", ENDS)
def test_an_answer_that_hides_the_error_is_not_stored(
    end: str, kind: Kind, old_code: Callable[[], None], serve: Serve, sender: Sender
) -> None:
    serve(view=kind(hidden(old_code, ENDS[end])))
    assert sender.send().status_code == 500
    # The session that the view closed holds the key until the server has noticed it.
    assert eventually(lambda: (status := sender.send().status_code) != 409 and status) == 500
    assert not IdempotencyKey.objects.finished().exists()
    assert not Entry.objects.exists()


@old_codes
def test_an_answer_that_is_never_stored_is_sent_as_it_is(
    old_code: Callable[[], None], serve: Serve, sender: Sender
) -> None:
    serve(view=plain(hidden(old_code, partial(HttpResponse, b"closed", status=503))))
    answer = sender.send()
    assert (answer.status_code, answer.content) == (503, b"closed")
    assert not IdempotencyKey.objects.exists()


@old_codes
def test_between_two_phases_it_commits_by_itself(
    old_code: Callable[[], None], serve: Serve, sender: Sender
) -> None:
    serve(view=two_phases(lambda request: None, create, call=old_code))
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    assert IdempotencyKey.objects.finished().count() == 1


@old_codes
def test_in_a_call_it_commits_by_itself_at_most_once(
    old_code: Callable[[], None], serve: Serve, sender: Sender
) -> None:
    runs = []

    def call(made: AtMostOnceCall) -> None:
        if made.due:
            runs.append(old_code())
            made.record("done")

    serve(view=texting(call))
    assert [sender.send().status_code for _ in range(2)] == [200, 200]
    assert len(runs) == 1


@pytest.mark.parametrize("old_code", [durable, closing_in_a_block])
def test_the_error_is_the_same_in_a_transaction_of_the_caller(
    old_code: Callable[[], None], serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponseBase:
        with suppress(Exception):
            old_code()
        return create(request)

    serve(view=in_transaction(plain(work)))
    sender.client.raise_request_exception = True
    with pytest.raises(RuntimeError, match=NAMES):
        sender.send()
    connection.close()
    assert not Entry.objects.exists()
