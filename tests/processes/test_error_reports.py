"""An error of project code that a process runs for a key: its report shows no secret in a frame of
this app."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db.models.signals import post_init
from django.http import HttpRequest, HttpResponse
from pytest_django import Settings

from idempotency import interventions
from idempotency.completer import complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.reaper import reap_once
from tests.kit.ageing import abandon, past_the_retention
from tests.kit.frames import OutOfLuck, Planted
from tests.kit.serving import Sender

Kept = Callable[..., IdempotencyKey]


def fail(*args: Any, **kwargs: Any) -> Any:
    """Fail as code of a project does."""
    raise OutOfLuck


class Leave(BaseException):
    """An exception that no loop handles."""


@pytest.fixture
def kept(planted: Planted, transactional_db: None, serve: Any) -> Kept:
    """Return a function that serves a view, and leaves a key of it unfinished."""

    def leave_unfinished(**options: Any) -> IdempotencyKey:
        @idempotent(recovery_points=[], keep=["session.card"], **options)
        def view(request: HttpRequest) -> HttpResponse:
            key = request.idempotency_key
            planted.of_key(key, derived=key.derive("charge"))
            raise errors.pop() if errors else OutOfLuck

        errors: list[BaseException] = []
        serve(view=view)
        sender = Sender()
        session = sender.client.session
        session["card"] = planted["session"]
        session.save()
        headers = {"Accept-Language": planted["header"]}
        assert (
            sender.send(
                key=planted["key"], body={"card": planted["body"]}, headers=headers
            ).status_code
            == 500
        )
        abandon()
        key = IdempotencyKey.objects.get()
        assert planted["body"] in bytes(key.request_body).decode()
        assert planted["session"] in str(key.request_headers)
        key.errors = errors
        return key

    return leave_unfinished


def test_60_error_of_a_view_that_the_completer_runs(
    kept: Kept, planted: Planted, caplog: pytest.LogCaptureFixture
) -> None:
    kept()
    with planted.logged(caplog):
        assert complete_once().failed == 1


def test_60_error_of_prepare_request(
    kept: Kept, planted: Planted, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    planted.of_key(kept())
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": fail}
    with planted.logged(caplog):
        assert complete_once().failed == 1


def test_60_error_of_the_user_model(
    kept: Kept, planted: Planted, caplog: pytest.LogCaptureFixture
) -> None:
    kept()
    post_init.connect(fail, sender=get_user_model())
    try:
        with planted.logged(caplog):
            assert complete_once().failed == 1
    finally:
        post_init.disconnect(fail, sender=get_user_model())


@pytest.mark.parametrize("run", ["completer", "complete_now"])
def test_60_exception_that_ends_the_process(
    run: str, kept: Kept, planted: Planted, caplog: pytest.LogCaptureFixture
) -> None:
    key = kept()
    planted.of_key(key)
    planted.secrets["seen"] = str(key.claim_token)
    key.errors.append(Leave())
    runs: dict[str, Callable[[], object]] = {
        "completer": complete_once,
        "complete_now": lambda: interventions.complete_now(
            key.pk, key.claim_token, by="jane", note="checked"
        ),
    }
    with pytest.raises(Leave) as caught:
        runs[run]()
    planted.refuse_shown(caught.value, at_least=10)
    planted.refuse_logged(caplog.records)


@pytest.mark.parametrize("error", [OutOfLuck, Leave])
def test_60_error_of_on_abandon(
    error: type[BaseException], kept: Kept, planted: Planted, caplog: pytest.LogCaptureFixture
) -> None:
    def on_abandon(key: IdempotencyKey) -> HttpResponse:
        planted.of_key(key, derived=key.derive("refund"))
        with key.call("refund"):
            raise error

    planted.of_key(kept(on_abandon=on_abandon))
    past_the_retention()
    if error is OutOfLuck:
        with planted.logged(caplog):
            assert reap_once().stuck == 1
    else:
        with pytest.raises(Leave) as caught:
            reap_once()
        planted.refuse_shown(caught.value, at_least=5)
