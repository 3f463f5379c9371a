"""A retry is the same request even if code, settings or secret have changed since its key was
created."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from pytest_django import Settings

from idempotency._http import fingerprint
from idempotency.models import IdempotencyKey
from tests.kit.database import statements
from tests.kit.serving import Sender, View, another_client, problem
from tests.kit.threads import Gate, in_background
from tests.kit.views import Counted, both_kinds, create, phased, plain, storing_no_body

Kind = Callable[..., View]
Serve = Callable[..., None]

NEW_SECRET = "a new secret, which signs from now on"


def other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a release with another version of the fingerprint."""
    monkeypatch.setattr(fingerprint, "VERSION", 2)
    monkeypatch.setattr(
        fingerprint, "_WAY", re.compile(fingerprint._WAY.pattern.replace("v1", "v2", 1))
    )


def rotate(settings: Settings) -> None:
    """Rotate the secret of the project, as in Django's documentation."""
    settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
    settings.SECRET_KEY = NEW_SECRET


def refused(response: Any) -> tuple[int, str, bool]:
    """Return the status and the code of a refusal, and whether the client may retry with the same
    key."""
    said = problem(response)
    return response.status_code, said["code"], said["retryable"]


TRY_AGAIN = (409, "key_in_use", True)
CHOOSE_A_NEW_KEY = (422, "key_reused", False)


@both_kinds
def test_27_row_of_another_version_is_not_judged(
    kind: Kind, serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(view=kind(work := Counted()))
    first = sender.send()
    with monkeypatch.context() as patch:
        other_version(patch)
        assert refused(sender.send()) == TRY_AGAIN
        assert refused(sender.send(body={"a": 2})) == TRY_AGAIN
    assert sender.send().content == first.content
    assert work.runs == 1


@both_kinds
@pytest.mark.postgres
def test_27_two_versions_at_once_run_one_and_refuse_no_retry_for_good(
    kind: Kind, serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponse:
        gate.wait_here()
        return create(request)

    serve(view=kind(counted := Counted(work)))
    first = in_background(another_client(sender).send)
    gate.wait_until_reached()
    with monkeypatch.context() as patch:
        other_version(patch)
        meanwhile = sender.send()
    gate.open()
    assert (refused(meanwhile), first.result(60).status_code) == (TRY_AGAIN, 201)
    assert sender.send().content == first.result().content
    assert counted.runs == 1


@both_kinds
def test_comparing_a_row_of_another_way_costs_no_statement(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    serve(view=kind(Counted()))
    sender.send()
    counts = []
    for by_host in (False, True):
        settings.IDEMPOTENCY = {"FINGERPRINT_HOST": by_host}
        with statements() as seen:
            assert sender.send()["Idempotent-Replayed"] == "true"
        counts.append(len(seen))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "deploy",
    [
        (phased, storing_no_body(phased)),
        (storing_no_body(phased), phased),
        (plain, phased),
        (phased, plain),
    ],
)
def test_a_deploy_that_changes_what_is_kept_makes_no_other_request_of_a_retry(
    deploy: tuple[Kind, Kind], serve: Serve, sender: Sender
) -> None:
    work = Counted()
    before, after = deploy
    serve(view=before(work))
    first = sender.send()
    serve(view=after(work))
    assert sender.send().content == first.content
    assert refused(sender.send(body={"a": 2})) == CHOOSE_A_NEW_KEY
    assert work.runs == 1


@both_kinds
@pytest.mark.parametrize("switch", [True, False])
def test_a_setting_that_lets_the_host_count_makes_no_other_request_of_a_retry(
    switch: bool, kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"FINGERPRINT_HOST": not switch}
    serve(view=kind(work := Counted()))
    first = sender.send()
    settings.IDEMPOTENCY = {"FINGERPRINT_HOST": switch}
    assert sender.send().content == first.content
    assert work.runs == 1


def test_an_unfinished_row_of_another_way_is_resumed(
    serve: Serve, sender: Sender, settings: Settings
) -> None:
    failures = [RuntimeError("out of luck")]

    def work(request: HttpRequest) -> HttpResponse:
        if failures:
            raise failures.pop()
        return create(request)

    serve(view=phased(work))
    assert sender.send().status_code == 500
    made = IdempotencyKey.objects.get().request_fingerprint
    settings.IDEMPOTENCY = {"FINGERPRINT_HOST": True}
    assert refused(sender.send(body={"a": 2})) == CHOOSE_A_NEW_KEY
    assert sender.send().status_code == 201
    key = IdempotencyKey.objects.get()
    assert (key.attempts, key.request_fingerprint) == (2, made)


@both_kinds
@pytest.mark.postgres
def test_a_secret_that_is_changed_while_the_first_request_runs_refuses_no_retry_for_good(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponse:
        gate.wait_here()
        return create(request)

    serve(view=storing_no_body(kind)(counted := Counted(work), scope=lambda request: "one"))
    first = in_background(another_client(sender).send)
    gate.wait_until_reached()
    rotate(settings)
    meanwhile = sender.send()
    gate.open()
    assert (refused(meanwhile), first.result(60).status_code) == (TRY_AGAIN, 201)
    again = sender.send()
    assert (again.content, again["Idempotent-Replayed"]) == (first.result().content, "true")
    assert counted.runs == 1


@both_kinds
def test_a_process_that_does_not_know_the_new_secret_yet_does_not_judge_its_keys(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    serve(view=storing_no_body(kind)(work := Counted(), scope=lambda request: "one"))
    former = settings.SECRET_KEY
    rotate(settings)
    first = sender.send()
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = former, []
    assert refused(sender.send()) == TRY_AGAIN
    rotate(settings)
    assert sender.send().content == first.content
    assert refused(sender.send(body={"a": 2})) == CHOOSE_A_NEW_KEY
    assert work.runs == 1
