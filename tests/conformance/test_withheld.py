"""Number 53: a body that ``store_body=False`` does not store stands in no table and no log line of
the app."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from django.apps import apps
from django.db import DatabaseError, OperationalError, connection
from django.http import HttpRequest, HttpResponse
from pytest_django import Settings

from idempotency.completer import complete_once
from idempotency.models import IdempotencyKey
from idempotency.reaper import reap_once
from tests.kit.ageing import make_older
from tests.kit.serving import Sender, View
from tests.kit.views import both_kinds, create, phased, storing_no_body, two_phases

Kind = Callable[..., View]
Serve = Callable[..., None]

NUMBER = "4242424242424242"


def everything_stored() -> str:
    """Return all that the tables of the app hold, as text."""
    rows = [
        row
        for model in apps.get_app_config("idempotency").get_models()
        for row in model._base_manager.values_list()
    ]
    return repr(
        [bytes(value) if isinstance(value, memoryview) else value for row in rows for value in row]
    )


@pytest.fixture
def hidden(caplog: pytest.LogCaptureFixture) -> Callable[[], bool]:
    """Return a function that tells whether the number stands in no table and in no line of the app,
    tracebacks included."""
    caplog.set_level(logging.DEBUG, "idempotency")

    def is_hidden() -> bool:
        records = [record for record in caplog.records if record.name == "idempotency"]
        lines = [caplog.handler.format(record) + repr(vars(record)) for record in records]
        return NUMBER not in everything_stored() and not any(NUMBER in line for line in lines)

    return is_hidden


def number_of(request: HttpRequest) -> str:
    """Return the number that the request carries."""
    card = json.loads(request.body)["card"]
    return str(card["number"] if isinstance(card, dict) else card)


def invalid(request: HttpRequest) -> HttpResponse:
    """Fail as ``int()`` does, with the value in the text, and in that of the cause."""
    try:
        raise KeyError(number_of(request))
    except KeyError as error:
        raise ValueError(
            f"invalid card: {number_of(request)}\nin the second line {number_of(request)}"
        ) from error


def refused_by_the_database(request: HttpRequest) -> HttpResponse:
    """Fail in a statement, whose error quotes the value."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT abs(%s)", [f"x{number_of(request)}"])
        cursor.execute(f"SELECT no_function_{number_of(request)}()")
    return create(request)


def database_gone(request: HttpRequest) -> HttpResponse:
    """Fail as when the database is lost, with the value in the text."""
    raise OperationalError(f"no server for {number_of(request)}")


@both_kinds
@pytest.mark.parametrize("work", [invalid, refused_by_the_database, database_gone])
def test_53_error_that_quotes_a_value_leaves_it_nowhere(
    work: Callable[[HttpRequest], HttpResponse],
    kind: Kind,
    serve: Serve,
    sender: Sender,
    hidden: Callable[[], bool],
) -> None:
    serve(view=storing_no_body(kind)(work))
    for _ in range(2):
        assert sender.send(body={"card": {"number": NUMBER}}).status_code in (500, 503)
    if kind is phased and work is invalid:
        key = IdempotencyKey.objects.get()
        assert key.last_error.startswith("ValueError in tests.conformance.test_withheld:")
    make_older(400, "created_at", "last_run_at")
    complete_once()
    assert hidden()


def test_53_error_between_phases_leaves_the_value_nowhere(
    serve: Serve, sender: Sender, hidden: Callable[[], bool]
) -> None:
    def call() -> None:
        raise RuntimeError(f"the bank refused {NUMBER}")

    def on_abandon(key: IdempotencyKey) -> HttpResponse:
        raise RuntimeError(f"cannot undo {NUMBER}")

    serve(
        view=two_phases(
            lambda request: None, create, call=call, on_abandon=on_abandon, store_body=False
        )
    )
    assert sender.send(body={"card": {"number": NUMBER}}).status_code == 500
    make_older(1000 * 3600, "created_at", "last_run_at")
    complete_once()
    IdempotencyKey.objects.update(stuck_at=None, stuck_code="", stuck_reason="")
    reap_once()
    assert IdempotencyKey.objects.get().stuck_code == "on_abandon"
    assert hidden()


@both_kinds
@pytest.mark.postgres
def test_53_retry_inside_the_process_leaves_the_value_nowhere(
    kind: Kind, serve: Serve, sender: Sender, hidden: Callable[[], bool]
) -> None:
    failures = [1]

    def work(request: HttpRequest) -> HttpResponse:
        while failures:
            failures.pop()
            try:
                with connection.cursor() as cursor:
                    cursor.execute(
                        f"DO $$ BEGIN RAISE 'conflict over {number_of(request)}' USING ERRCODE ="
                        " '40001'; END $$"
                    )
            except DatabaseError as error:
                raise ValueError(number_of(request)) from error
        return create(request)

    serve(view=storing_no_body(kind)(work))
    assert sender.send(body={"card": {"number": NUMBER}}).status_code == 201
    assert hidden()


@both_kinds
@pytest.mark.parametrize(
    "card", [{"number": NUMBER}, NUMBER, int(NUMBER), [NUMBER], [{"number": [NUMBER]}], [[NUMBER]]]
)
def test_53_value_in_any_place_of_its_parent_is_not_kept(
    card: Any,
    kind: Kind,
    serve: Serve,
    sender: Sender,
    settings: Settings,
    hidden: Callable[[], bool],
) -> None:
    serve(view=storing_no_body(kind)(create))
    sent = [sender.send(body={"card": card}) for _ in range(2)]
    assert sent[1]["Idempotent-Replayed"] == "true"
    assert sender.send(body={"card": {"number": NUMBER[::-1]}}).status_code == 422
    assert hidden()


@both_kinds
def test_error_of_a_view_that_stores_the_body_is_kept_with_its_text(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(invalid))
    assert sender.send(body={"card": {"number": NUMBER}}).status_code == 500
    if kind is phased:
        assert f"invalid card: {NUMBER}" in IdempotencyKey.objects.get().last_error
