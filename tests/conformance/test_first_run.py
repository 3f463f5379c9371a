"""Numbers 12 and 14 to 19: the first run, and what is kept of it. Number 13 is in
``test_kill.py``."""

import json
from collections import Counter
from collections.abc import Callable

import pytest
from django.core.exceptions import PermissionDenied
from django.db import OperationalError, connection
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseRedirect,
    JsonResponse,
    StreamingHttpResponse,
)
from pytest_django import Settings

from idempotency.http import not_stored
from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender, View, another_client, problem
from tests.kit.threads import at_once
from tests.kit.views import Counted, Work, both_kinds, create, phased_outside, plain, two_phases
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]


@both_kinds
def test_12_fifty_identical_requests_run_the_view_once(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted()))
    responses = at_once([another_client(sender).send for _ in range(50)])
    refusals = {201, 409} if connection.vendor == "postgresql" else {201, 409, 503}
    assert {response.status_code for response in responses} <= refusals
    created = [response for response in responses if response.status_code == 201]
    assert len({response.content for response in created}) == 1
    assert Counter("Idempotent-Replayed" in response for response in created)[False] == 1
    assert all(
        int(response["Retry-After"]) >= 1 for response in responses if response.status_code != 201
    )
    assert work.runs == 1
    assert Entry.objects.count() == 1
    assert sender.send().content == created[0].content


@both_kinds
def test_14_status_bytes_and_headers_are_stored_and_fresh_ones_are_not(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    content = bytes(range(256))
    kept = {
        "Content-Type": "application/octet-stream",
        "Location": "/rides/1",
        "ETag": '"v1"',
        "Link": '</rides>; rel="collection"',
        "X-Custom": "Grüße",
        "Vary": "Accept",
    }
    fresh = {
        "Date": "Mon, 01 Jan 2024 00:00:00 GMT",
        "Server": "old",
        "Authorization": "Bearer secret",
        "WWW-Authenticate": "Basic",
        "X-RateLimit-Remaining": "7",
        "RateLimit": "limit=10",
        "X-Request-Id": "first",
    }

    def answer(request: HttpRequest) -> HttpResponse:
        response = HttpResponse(content, status=207, headers=kept | fresh)
        response.set_cookie("private", "secret")
        return response

    serve(view=kind(answer))
    first, replayed = sender.send(), sender.send()
    assert (replayed.status_code, replayed.content) == (207, content)
    assert {name: replayed[name] for name in kept} == {name: first[name] for name in kept}
    assert not set(fresh) & set(replayed.headers)
    assert "private" in first.cookies
    assert "private" not in replayed.cookies
    assert "secret" not in str(IdempotencyKey.objects.values().get())


@both_kinds
@pytest.mark.parametrize(
    "status", [200, 201, 202, 204, 207, 301, 302, 303, 307, 400, 402, 404, 409, 410, 422, 451]
)
def test_15_definitive_answers_are_stored(
    status: int, kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(
        view=kind(work := Counted(lambda request: HttpResponse(f"answer {status}", status=status)))
    )
    first, replayed = sender.send(), sender.send()
    assert (first.status_code, replayed.status_code) == (status, status)
    assert replayed.content == first.content
    assert replayed["Idempotent-Replayed"] == "true"
    assert work.runs == 1


# The completer stores no redirect to the login page, but the view of a new account may end there.
@both_kinds
@pytest.mark.parametrize("url", ["/rides/1", "/accounts/login/"])
def test_15_redirect_is_replayed(url: str, kind: Kind, serve: Serve, sender: Sender) -> None:
    serve(view=kind(work := Counted(lambda request: HttpResponseRedirect(url))))
    assert [sender.send()["Location"] for _ in range(2)] == [url, url]
    assert work.runs == 1


answering = pytest.mark.parametrize("kind", [plain, phased_outside])


@answering
@pytest.mark.parametrize("status", [400, 402, 404, 409, 422])
def test_15_definitive_refusals_before_anything_was_committed_are_stored(
    status: int, kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted(lambda request: HttpResponse("no", status=status))))
    assert [sender.send().status_code for _ in range(2)] == [status, status]
    assert work.runs == 1


@answering
@pytest.mark.parametrize("status", [401, 403, 408, 412, 425, 428, 429])
def test_15_answers_with_another_cure_are_never_stored(
    status: int, kind: Kind, serve: Serve, sender: Sender
) -> None:
    answers = iter([HttpResponse(status=status), HttpResponse(status=404)])
    serve(view=kind(work := Counted(lambda request: next(answers))))
    assert [sender.send().status_code for _ in range(3)] == [status, 404, 404]
    assert work.runs == 2


@answering
def test_15_which_statuses_are_never_stored_is_a_setting(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"NEVER_STORED_STATUSES": [404]}
    serve(missing=kind(missing := Counted(lambda request: HttpResponse(status=404))))
    assert [sender.send("/missing/").status_code for _ in range(2)] == [404, 404]
    assert missing.runs == 2
    serve(forbidden=kind(forbidden := Counted(lambda request: HttpResponse(status=403))))
    assert [sender.send("/forbidden/", key="key-2").status_code for _ in range(2)] == [403, 403]
    assert forbidden.runs == 1


@both_kinds
def test_15_http_exceptions_are_the_answers_that_django_makes_of_them(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    def missing(request: HttpRequest) -> HttpResponse:
        create(request)
        raise Http404

    def forbidden(request: HttpRequest) -> HttpResponse:
        create(request)
        raise PermissionDenied

    serve(
        missing=kind(not_found := Counted(missing)), forbidden=kind(refused := Counted(forbidden))
    )
    responses = [sender.send("/missing/") for _ in range(2)]
    assert [response.status_code for response in responses] == [404, 404]
    assert responses[0].content == responses[1].content
    assert not_found.runs == 1
    assert [sender.send("/forbidden/", key="key-2").status_code for _ in range(2)] == [403, 403]
    assert refused.runs == 2
    assert not Entry.objects.exists()


def test_15_marked_response_of_a_plain_view_is_not_stored(serve: Serve, sender: Sender) -> None:
    serve(view=plain(work := Counted(lambda request: not_stored(create(request)))))
    assert not any("Idempotent-Replayed" in sender.send() for _ in range(2))
    assert work.runs == 2
    assert not Entry.objects.exists()


def test_15_marked_response_of_a_phased_view_is_not_stored(serve: Serve, sender: Sender) -> None:
    serve(view=phased_outside(work := Counted(lambda request: not_stored(HttpResponse("not yet")))))
    assert not any("Idempotent-Replayed" in sender.send() for _ in range(2))
    assert work.runs == 2
    assert not IdempotencyKey.objects.in_flight().exists()


def failing_once(fail: Callable[[], HttpResponse], then: Work = create) -> Counted:
    """Return work that fails in its first run, after it has done what it does."""

    def work(request: HttpRequest) -> HttpResponse:
        response = then(request)
        return fail() if counted.runs == 1 else response

    counted = Counted(work)
    return counted


def raise_error() -> HttpResponse:
    """Fail as a mistake in a view does."""
    raise RuntimeError("out of luck")


@pytest.mark.parametrize("status", [500, 502, 503, 599])
def test_16_returned_5xx_of_a_plain_view_is_rolled_back_and_not_stored(
    status: int, serve: Serve, sender: Sender
) -> None:
    serve(view=plain(work := failing_once(lambda: HttpResponse(status=status))))
    assert sender.send().status_code == status
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.exists()
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    assert (work.runs, Entry.objects.count()) == (2, 1)


@both_kinds
def test_16_raised_error_is_rolled_back_and_not_stored(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := failing_once(raise_error)))
    assert sender.send().status_code == 500
    assert not Entry.objects.exists()
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    assert (work.runs, Entry.objects.count()) == (2, 1)


def test_16_error_in_a_later_phase_releases_the_key_and_is_resumed(
    serve: Serve, sender: Sender
) -> None:
    serve(
        view=two_phases(
            first := Counted(),
            second := failing_once(raise_error, lambda request: JsonResponse({}, status=201)),
        )
    )
    assert sender.send().status_code == 500
    key = IdempotencyKey.objects.get()
    assert (key.recovery_point, key.locked_until) == ("between", None)
    assert "out of luck" in key.last_error
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    assert (first.runs, second.runs) == (1, 2)


def test_16_returned_5xx_of_a_phased_view_releases_the_key(serve: Serve, sender: Sender) -> None:
    answers = iter([HttpResponse(status=503), HttpResponse("known", status=404)])
    serve(view=phased_outside(work := Counted(lambda request: next(answers))))
    assert sender.send().status_code == 503
    key = IdempotencyKey.objects.get()
    assert (key.recovery_point, key.locked_until) == ("started", None)
    assert "503" in key.last_error
    assert [sender.send().status_code for _ in range(2)] == [404, 404]
    assert work.runs == 2


@pytest.mark.parametrize(
    ("kind", "fail"),
    [
        (plain, lambda: HttpResponse("down", status=503)),
        (plain, raise_error),
        (phased_outside, lambda: HttpResponse("down", status=503)),
        (phased_outside, raise_error),
    ],
    ids=["plain-returned", "plain-raised", "phased-returned", "phased-raised"],
)
def test_16_store_5xx_keeps_them_as_stripe_does(
    kind: Kind, fail: Callable[[], HttpResponse], serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"STORE_5XX": True}
    serve(view=kind(work := Counted(lambda request: fail())))
    first, second = sender.send(), sender.send()
    assert first.status_code >= 500
    assert (second.status_code, second.content) == (first.status_code, first.content)
    assert second["Idempotent-Replayed"] == "true"
    assert work.runs == 1


@pytest.mark.parametrize("kind", [plain, phased_outside])
def test_16_an_error_of_the_database_is_not_stored_with_store_5xx_either(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    def fail(request: HttpRequest) -> HttpResponse:
        raise OperationalError("the database is down")

    settings.IDEMPOTENCY = {"STORE_5XX": True}
    serve(view=kind(work := Counted(fail)))
    assert all(sender.send().status_code >= 500 for _ in range(2))
    assert work.runs == 2


@pytest.mark.parametrize("kind", [plain, phased_outside])
def test_16_a_5xx_that_is_never_stored_is_not_stored_with_store_5xx_either(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"STORE_5XX": True, "NEVER_STORED_STATUSES": [429, 503]}
    serve(view=kind(work := Counted(lambda request: HttpResponse("down", status=503))))
    assert [sender.send().status_code for _ in range(2)] == [503, 503]
    assert work.runs == 2


def large(request: HttpRequest) -> HttpResponse:
    """Answer with a body that is not kept."""
    create(request)
    return HttpResponse(b"x" * 2000, status=201, headers={"X-Custom": "kept"})


def streaming(request: HttpRequest) -> StreamingHttpResponse:
    """Answer with a body that is made while it is sent."""
    create(request)
    return StreamingHttpResponse(
        (b"x" * 1000 for _ in range(2)), status=201, headers={"X-Custom": "kept"}
    )


@both_kinds
@pytest.mark.parametrize("answer", [large, streaming])
def test_17_body_that_is_not_kept_is_delivered_whole_and_its_replay_says_so(
    answer: Callable[..., HttpResponse],
    kind: Kind,
    serve: Serve,
    sender: Sender,
    settings: Settings,
) -> None:
    settings.IDEMPOTENCY = {"MAX_STORED_BODY_BYTES": 1999}
    serve(view=kind(work := Counted(answer)))
    first, replayed = sender.send(), sender.send()
    assert first.getvalue() == b"x" * 2000
    assert "Idempotent-Body-Omitted" not in first
    assert (replayed.status_code, replayed.content, replayed["X-Custom"]) == (201, b"", "kept")
    assert replayed["Idempotent-Body-Omitted"] == "true"
    assert (work.runs, Entry.objects.count()) == (1, 1)


@both_kinds
def test_17_body_of_the_limit_is_kept(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"MAX_STORED_BODY_BYTES": 2000}
    serve(view=kind(large))
    assert sender.send().content == sender.send().content == b"x" * 2000


@both_kinds
@pytest.mark.postgres
def test_18_database_that_is_not_reachable_is_a_503_and_the_view_does_not_run(
    kind: Kind, serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(view=kind(work := Counted(), scope=lambda request: "one"))
    connection.close()
    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "HOST", "/nowhere")
        response = sender.send()
    assert (response.status_code, problem(response)["code"]) == (503, "database_unavailable")
    assert problem(response)["retryable"] is True
    assert int(response["Retry-After"]) >= 1
    assert work.runs == 0
    assert sender.send().status_code == 201


@both_kinds
def test_19_deferred_constraint_that_fails_at_commit_is_never_a_success(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        entry = Entry.objects.create(
            name="made", idempotency_key_id=-1 if counted.runs == 1 else None
        )
        return JsonResponse({"id": entry.pk}, status=201)

    serve(view=kind(counted := Counted(work)))
    assert sender.send().status_code == 500
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.finished().exists()
    assert not IdempotencyKey.objects.in_flight().exists()
    assert [json.loads(sender.send().content) for _ in range(2)] == [
        {"id": Entry.objects.get().pk}
    ] * 2
    assert counted.runs == 2
