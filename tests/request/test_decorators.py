"""``@idempotent`` in Django: errors at decoration, transactions, retries inside the process,
statements per request."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
from django.contrib import messages
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import DataError, IntegrityError, connection, connections, transaction
from django.db.models import F, Sum
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.test.client import encode_multipart
from django.urls import path
from django.views.decorators.http import require_POST
from pytest_django import Settings

from benchmarks.counts import sent
from idempotency._http.problems import problem_of
from idempotency.decorators import idempotent
from idempotency.exceptions import InProgress
from idempotency.jobs import stage_job
from idempotency.models import IdempotencyKey, StagedJob
from idempotency.phases import atomic_phase
from tests.kit.database import statements
from tests.kit.serving import Sender, View, another_client
from tests.kit.threads import Gate, at_once, elsewhere, in_background
from tests.kit.views import Counted, both_kinds, create, phased, plain, two_phases
from tests.models import Account, Entry

Kind = Callable[..., View]
Serve = Callable[..., None]


def serializable(kind: Kind) -> Callable[..., View]:
    """Return the kind with transactions under SERIALIZABLE."""
    return partial(kind, isolation="serializable")


def disturb(account: Account) -> None:
    """Change the account on another connection: a transaction that has read the account can no
    longer change it."""
    elsewhere(lambda: Account.objects.filter(pk=account.pk).update(balance=F("balance") + 100))


# At decoration


def test_every_form_of_decoration_protects() -> None:
    def view(request: HttpRequest) -> HttpResponse:
        """Do it."""
        return HttpResponse()

    for protected in (idempotent(view), idempotent()(view), idempotent(required=False)(view)):
        assert (protected.__name__, protected.__doc__, protected.__wrapped__) == (
            "view",
            "Do it.",
            view,
        )


@pytest.mark.parametrize(
    "points",
    [["a", "a"], ["started"], ["finished"], ["a", "finished"], [""], ["x" * 51]],
)
def test_bad_recovery_points_are_refused_at_decoration(points: list[str]) -> None:
    with pytest.raises(ValueError, match="recovery_points"):
        idempotent(recovery_points=points)


def test_a_string_of_recovery_points_is_refused_at_decoration() -> None:
    """A string is a sequence too, of its letters."""
    with pytest.raises((TypeError, ValueError), match="recovery_points"):
        idempotent(recovery_points="charged")


def test_phased_view_without_required_key_is_refused_at_decoration() -> None:
    with pytest.raises(ValueError, match="required=False"):
        idempotent(recovery_points=["a"], required=False)


def test_unknown_isolation_is_refused_at_decoration() -> None:
    with pytest.raises(ValueError, match="isolation"):
        idempotent(isolation="serialisable")


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("applies", "x", "a function of the request"),
        ("validate", "x", "a function of the request"),
        ("scope", "user", "a function of the request, such as idempotency.scopes.user"),
        ("on_abandon", "x", "a function of the key"),
        ("using", 5, "a database alias or a function of the request"),
        ("wait_seconds", "5", "a number, 0 or more"),
        ("wait_seconds", None, "a number, 0 or more"),
        ("wait_seconds", -1, "a number, 0 or more"),
        ("retention_hours", 23, "a whole number from 24 to 87600"),
        ("retention_hours", 87601, "a whole number from 24 to 87600"),
        ("retention_hours", 24.5, "a whole number from 24 to 87600"),
        ("lease_seconds", 0, "a whole number from 1 to 86400"),
        ("lease_seconds", 86_401, "a whole number from 1 to 86400"),
        ("lease_seconds", True, "a whole number from 1 to 86400"),
    ],
)
def test_an_argument_of_another_kind_is_refused_at_decoration(
    name: str, value: Any, right: str
) -> None:
    with pytest.raises(ValueError, match=f"^The option {name} must be {right}, not {value!r}.$"):
        idempotent(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("keep", ["session.basket"]), ("store_body", True), ("store_body", False)]
)
def test_an_option_for_the_completer_is_refused_for_a_plain_view(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^The option {name} needs recovery_points"):
        idempotent(**{name: value})


@pytest.mark.parametrize("name", ["applies", "validate", "scope", "using", "key_from"])
def test_a_coroutine_function_that_nobody_would_await_is_refused_at_decoration(name: str) -> None:
    async def function(request: HttpRequest) -> Any:
        return None

    with pytest.raises(ValueError, match=f"^The option {name} must be .*function of the request"):
        idempotent(**{name: function})


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "TRACE"])
@both_kinds
def test_safe_methods_pass_through_without_a_query(
    method: str, kind: Kind, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        return HttpResponse(str(request.idempotency_key))

    serve(view=idempotent(work) if kind is plain else idempotent(recovery_points=["a"])(work))
    with statements() as made:
        assert sender.send(method=method).status_code == 200
    assert len(made) == 0


def test_view_arguments_come_through(serve: Serve, sender: Sender, settings: Settings) -> None:
    @require_POST
    @idempotent
    def view(request: HttpRequest, name: str, *, number: int) -> JsonResponse:
        return JsonResponse([name, number], safe=False)

    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("<name>/<int:number>/", view)]})
    assert [sender.send("/a/7/").json() for _ in range(2)] == [["a", 7], ["a", 7]]
    assert sender.send("/a/7/", method="GET").status_code == 405


# Transactions


@both_kinds
def test_atomic_requests_do_not_wrap_a_protected_view(
    kind: Kind, serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    serve(
        view=require_POST(kind(work := Counted())),
        other=lambda request: HttpResponse(str(connection.in_atomic_block)),
    )
    assert sender.send("/other/").content == b"True"
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    assert work.runs == 1


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_atomic_requests_hold_for_what_is_not_protected(
    serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Otherwise half of a transfer would be committed, although the request was atomic before the
    view was decorated."""

    def transfer(request: HttpRequest) -> HttpResponseBase:
        Entry.objects.create(name="debit")
        raise LookupError("no such account")

    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    serve(view=idempotent(required=False)(transfer))
    assert sender.send(key=None, method=method).status_code == 500
    assert not Entry.objects.exists()
    serve(view=idempotent(required=False)(transaction.non_atomic_requests(transfer)))
    assert sender.send(key=None, method=method).status_code == 500
    assert Entry.objects.count() == 1


def test_the_refusal_of_a_view_inside_is_not_stored_by_the_one_around_it(
    serve: Serve, sender: Sender
) -> None:

    @idempotent(recovery_points=["a"])
    def outer(request: HttpRequest) -> HttpResponseBase:
        if request.idempotency_key.attempts == 1:
            return problem_of(InProgress()).response(request)
        for _ in (key := request.idempotency_key).phases():
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse(status=201))
        return key.response()

    serve(view=outer)
    assert [sender.send().status_code for _ in range(2)] == [409, 201]


def test_phased_view_in_an_outer_transaction_is_refused(serve: Serve, sender: Sender) -> None:
    view = phased(work := Counted())

    def outer(request: HttpRequest) -> HttpResponseBase:
        with transaction.atomic():
            return view(request)

    serve(view=outer, inner=view)
    assert sender.send().status_code == 500
    assert work.runs == 0
    assert not IdempotencyKey.objects.exists()
    assert sender.send("/inner/").status_code == 201


def test_phase_in_a_transaction_of_the_view_is_refused(serve: Serve, sender: Sender) -> None:
    @idempotent(recovery_points=["a"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            with transaction.atomic():
                Entry.objects.create(name="outer")
                with atomic_phase(key) as phase:
                    phase.set_response(HttpResponse())
        return key.response()

    serve(view=view)
    assert sender.send().status_code == 500
    assert not Entry.objects.exists()
    assert IdempotencyKey.objects.get().locked_until is None


@both_kinds
def test_rollback_that_the_view_asked_for_is_no_success(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        create(request)
        transaction.set_rollback(True)
        return HttpResponse(status=201)

    serve(view=kind(work))
    assert elsewhere(another_client(sender).send).status_code == 500  # on a new connection
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.finished().exists()


@both_kinds
@pytest.mark.postgres
def test_rollback_that_the_view_asked_for_is_no_serialization_failure(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        transaction.set_rollback(True)
        return HttpResponse(status=201)

    serve(before=serializable(kind)(Disturbed()), view=serializable(kind)(counted := Counted(work)))
    assert sender.send("/before/", key="key-0").status_code == 201
    assert sender.send().status_code == 500
    assert counted.runs == 1


@both_kinds
@pytest.mark.postgres
def test_database_error_that_the_view_swallowed_is_no_success(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        create(request)
        with suppress(DataError):
            connection.cursor().execute("SELECT 1 / 0")
        return HttpResponse(status=201)

    serve(view=kind(work))
    assert sender.send().status_code == 500
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.finished().exists()


@pytest.mark.postgres
@pytest.mark.parametrize("fails", [True, False])
def test_a_key_that_the_view_itself_committed_is_not_answered_with_an_empty_success(
    fails: bool, serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    @idempotent
    def view(request: HttpRequest) -> HttpResponseBase:
        with connection.cursor() as cursor:
            cursor.execute("COMMIT")
        if fails:
            raise RuntimeError("on purpose")
        return HttpResponse(status=503)

    serve(view=view)
    assert sender.send().status_code == (500 if fails else 503)
    answer = sender.send()
    assert (answer.status_code, answer.json()["code"]) == (409, "key_stuck")
    assert "was committed without a result, probably because the view" in caplog.text
    assert "Remove the COMMIT" in caplog.text


@pytest.mark.parametrize("savepoint", [True, False])
@pytest.mark.postgres
def test_a_conflict_that_a_plain_view_answers_itself_is_stored_if_its_transaction_is_whole(
    savepoint: bool, serve: Serve, sender: Sender
) -> None:
    """A database error that is caught without a savepoint leaves a broken transaction, which cannot
    store a response."""
    Account.objects.create(name="taken")

    def view(request: HttpRequest) -> HttpResponse:
        try:
            with transaction.atomic() if savepoint else nullcontext():
                connection.cursor().execute(
                    "INSERT INTO tests_account (name, balance) VALUES ('taken', 0)"
                )
        except IntegrityError:
            return HttpResponse(status=409)
        return HttpResponse(status=201)

    serve(view=idempotent(view))
    assert sender.send().status_code == (409 if savepoint else 500)
    assert IdempotencyKey.objects.count() == savepoint


@pytest.mark.parametrize("kind", [plain, phased])
@pytest.mark.postgres
def test_without_autocommit_nothing_runs(kind: Any, serve: Serve, sender: Sender) -> None:
    """Without autocommit, no commit would store the response."""
    serve(view=kind(create))
    sender.client.session  # noqa: B018
    connection.set_autocommit(False)
    try:
        answer = sender.send()
    finally:
        connection.close()
    assert answer.status_code == 500
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.exists()


@both_kinds
@pytest.mark.postgres
def test_isolation_of_the_view_and_of_the_connection_around_it(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    from psycopg import IsolationLevel

    levels = []

    def work(request: HttpRequest) -> HttpResponse:
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            levels.append(cursor.fetchone()[0])
        if counted.runs == 2:
            raise RuntimeError("out of luck")
        return HttpResponse(status=201)

    serve(view=kind(counted := Counted(work)), strict=serializable(kind)(counted))
    connection.ensure_connection()
    connection.connection.isolation_level = IsolationLevel.REPEATABLE_READ
    sender.send()
    assert sender.send("/strict/", key="key-2").status_code == 500
    sender.send("/strict/", key="key-3")
    assert levels == ["repeatable read", "serializable", "serializable"]
    assert connection.connection.isolation_level == IsolationLevel.REPEATABLE_READ
    assert connection.get_autocommit()
    connection.close()


@both_kinds
@pytest.mark.postgres
def test_closed_connection_is_reopened(kind: Kind, serve: Serve, sender: Sender) -> None:
    view = serializable(kind)(Counted())

    def after_a_cut(request: HttpRequest) -> HttpResponseBase:
        request.user.is_authenticated  # noqa: B018 - fetched while there is a connection
        connection.connection.close()
        return view(request)

    serve(view=after_a_cut)
    answer = sender.send()
    if answer.status_code == 503:  # The next request must succeed.
        serve(view=view)
        answer = sender.send()
    assert answer.status_code == 201


@pytest.mark.postgres
def test_connection_closed_between_phases_is_reopened(serve: Serve, sender: Sender) -> None:
    serve(
        view=two_phases(
            create,
            lambda request: HttpResponse(status=201),
            call=lambda: connection.connection.close(),
        )
    )
    assert sender.send().status_code == 201
    assert IdempotencyKey.objects.get().attempts == 1


# Retries inside the process


class Disturbed:
    """Work that adds 1 to the account of a test; its first ``times`` runs get a serialization
    failure."""

    def __init__(self, times: int = 1, then: Callable[[HttpRequest], Any] = create) -> None:
        self.account = Account.objects.create(name="shared")
        self.times, self.then = times, then

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        account = Account.objects.get(pk=self.account.pk)
        response = self.then(request)
        if self.times:
            self.times -= 1
            disturb(account)
        account.balance += 1
        account.save()
        return response


@both_kinds
@pytest.mark.postgres
def test_retry_finds_a_fresh_user(kind: Kind, serve: Serve, sender: Sender) -> None:
    seen = []

    def rename(request: HttpRequest) -> HttpResponse:
        seen.append(request.user.first_name)
        request.user.first_name += "x"
        request.user.save()
        return HttpResponse(status=201)

    serve(view=serializable(kind)(Disturbed(times=2, then=rename)))
    assert sender.send().status_code == 201
    assert seen == ["", "", ""]
    sender.user.refresh_from_db()
    assert sender.user.first_name == "x"


@both_kinds
@pytest.mark.postgres
def test_retry_finds_the_request_as_it_was(kind: Kind, serve: Serve, sender: Sender) -> None:
    seen = []

    def use_up(request: HttpRequest) -> HttpResponse:
        seen.append(
            (
                request.read(),
                request.body,
                hasattr(request, "mine"),
                request.idempotency_key.recovery_point,
            )
        )
        request.mine = True
        request.method = "BROKEN"
        return HttpResponse(status=201)

    serve(view=serializable(kind)(Disturbed(then=use_up)))
    assert sender.send(body="[1]").status_code == 201
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert seen[1][1:3] == (b"[1]", False)


@both_kinds
@pytest.mark.postgres
def test_retry_finds_the_files_rewound(kind: Kind, serve: Serve, sender: Sender) -> None:
    seen = []

    def read(request: HttpRequest) -> HttpResponse:
        seen.append((request.POST["a"], request.FILES["f"].read()))
        return HttpResponse(status=201)

    serve(view=serializable(kind)(Disturbed(then=read)))
    body = encode_multipart("x", {"a": "1", "f": SimpleUploadedFile("a.txt", b"content")})
    assert sender.send(body=body, content_type="multipart/form-data; boundary=x").status_code == 201
    assert seen == [("1", b"content")] * 2


@both_kinds
@pytest.mark.postgres
def test_retry_finds_the_session_as_it_was(kind: Kind, serve: Serve, sender: Sender) -> None:
    def count(request: HttpRequest) -> HttpResponse:
        request.session["visits"] = request.session.get("visits", 0) + 1
        return HttpResponse(status=201)

    serve(view=serializable(kind)(Disturbed(times=2, then=count)))
    assert sender.send().status_code == 201
    assert sender.client.session["visits"] == 1


@both_kinds
@pytest.mark.postgres
def test_retry_finds_the_messages_as_they_were(kind: Kind, serve: Serve, sender: Sender) -> None:
    def tell(request: HttpRequest) -> HttpResponse:
        messages.success(request, "booked")
        return HttpResponse(status=201)

    def told(request: HttpRequest) -> JsonResponse:
        return JsonResponse(
            [str(message) for message in messages.get_messages(request)], safe=False
        )

    serve(view=serializable(kind)(Disturbed(times=2, then=tell)), told=told)
    assert sender.send().status_code == 201
    assert sender.client.get("/told/").json() == ["booked"]


@pytest.mark.postgres
def test_retry_goes_on_from_the_last_committed_phase(
    serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"PHASE_ISOLATION": "serializable"}
    serve(
        view=two_phases(
            first := Counted(),
            second := Counted(Disturbed(times=3, then=lambda request: HttpResponse(status=201))),
        )
    )
    assert sender.send().status_code == 201
    assert (first.runs, second.runs, Entry.objects.count()) == (1, 4, 1)


@both_kinds
@pytest.mark.postgres
def test_failed_runs_leave_no_jobs(kind: Kind, serve: Serve, sender: Sender) -> None:
    def stage(request: HttpRequest) -> HttpResponse:
        stage_job("tests.kit.jobs.anything", {})
        return HttpResponse(status=201)

    serve(view=serializable(kind)(Disturbed(times=2, then=stage)))
    assert sender.send().status_code == 201
    assert StagedJob.objects.count() == 1


@both_kinds
@pytest.mark.postgres
def test_deadlock_is_retried(kind: Kind, serve: Serve, sender: Sender) -> None:
    one, other = (Account.objects.create(name=name) for name in ("one", "other"))
    gate = Gate()

    def pay(request: HttpRequest) -> HttpResponse:
        first, second = (one, other) if request.headers["Idempotency-Key"] == "a" else (other, one)
        Account.objects.filter(pk=first.pk).update(balance=F("balance") + 1)
        if work.runs == 1:
            gate.wait_here()
        else:
            gate.open()
        Account.objects.filter(pk=second.pk).update(balance=F("balance") + 1)
        return HttpResponse(status=201)

    serve(view=kind(work := Counted(pay)))
    running = in_background(lambda: another_client(sender).send(key="a"))
    gate.wait_until_reached()
    assert sender.send(key="b").status_code == 201
    assert running.result(60).status_code == 201
    assert work.runs >= 3
    assert Account.objects.aggregate(total=Sum("balance"))["total"] == 4


@both_kinds
@pytest.mark.postgres
def test_eight_clients_on_different_keys_meet_no_409(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    for name in ("one", "other"):
        Account.objects.create(name=name)

    def work(request: HttpRequest) -> HttpResponse:
        total = Account.objects.aggregate(total=Sum("balance"))["total"]
        entry = Entry.objects.create(name=f"saw {total}")
        Account.objects.filter(name="one").update(balance=F("balance") + 1)
        return JsonResponse({"id": entry.pk}, status=201)

    def client(number: int) -> list[int]:
        own = another_client(sender)
        return [own.send(key=f"key-{number}-{turn}").status_code for turn in range(4)]

    serve(view=serializable(kind)(counted := Counted(work)))
    assert at_once([partial(client, number) for number in range(8)]) == [[201] * 4] * 8
    assert Entry.objects.count() == Account.objects.get(name="one").balance == 32
    assert counted.runs > 32, "nobody met anybody: this proved nothing"


@both_kinds
@pytest.mark.postgres
def test_get_or_create_race_under_serializable_is_retried(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        list(Account.objects.all())
        account, _ = Account.objects.get_or_create(name="shared")
        return HttpResponse(str(account.pk), status=201)

    serve(view=serializable(kind)(work))
    for turn in range(5):
        Account.objects.all().delete()
        clients = [
            partial(another_client(sender).send, key=f"key-{turn}-{number}") for number in range(8)
        ]
        answers = at_once(clients)
        assert {answer.status_code for answer in answers} == {201}
        assert len({answer.content for answer in answers}) == 1
        assert Account.objects.count() == 1


@both_kinds
@pytest.mark.postgres
def test_unique_violation_of_its_own_making_is_given_up_soon(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    Account.objects.create(name="taken")

    def work(request: HttpRequest) -> HttpResponse:
        Account.objects.create(name="taken")
        return HttpResponse(status=201)

    serve(view=serializable(kind)(counted := Counted(work)))
    assert sender.send().status_code == 500
    assert counted.runs == 3
    assert not IdempotencyKey.objects.in_flight().exists()


@pytest.mark.parametrize(
    "kind",
    [
        plain,
        phased,
    ],
)
@pytest.mark.postgres
def test_serialization_failure_after_commit_does_not_lose_the_answer(
    kind: Kind, serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    """An on-commit hook may fail like the work, but the work is already committed."""
    failures = [1]

    def hook() -> None:
        if failures:
            failures.pop()
            connection.cursor().execute(
                "DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$"
            )

    def work(request: HttpRequest) -> HttpResponse:
        transaction.on_commit(hook)
        return create(request)

    serve(view=kind(counted := Counted(work)))
    first, second = sender.send(), sender.send()
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert (counted.runs, Entry.objects.count()) == (1, 1)
    assert ("failed after the COMMIT of key" in caplog.text) is (kind is plain)


# Failures


@both_kinds
@pytest.mark.parametrize("leave", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_leaving_the_process_releases_the_key(
    leave: type[BaseException], kind: Kind, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        response = create(request)
        if counted.runs == 1:
            raise leave
        return response

    serve(view=kind(counted := Counted(work)))
    with pytest.raises(leave):
        sender.send()
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.in_flight().exists()
    assert sender.send().status_code == 201


@pytest.mark.postgres
def test_response_that_no_phase_stored_is_refused(serve: Serve, sender: Sender) -> None:
    @idempotent(recovery_points=["a"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for recovery_point in key.phases():
            if recovery_point == "a":
                break
            with atomic_phase(key) as phase:
                phase.set_recovery_point("a")
        return HttpResponse("not kept", status=int(request.GET["status"]))

    serve(view=view)
    for status in (201, 302, 404):
        assert sender.send(f"/view/?status={status}", key=str(status)).status_code == 500
    assert "ResponseNotCommitted" in IdempotencyKey.objects.first().last_error
    assert not IdempotencyKey.objects.finished().exists()
    assert not IdempotencyKey.objects.in_flight().exists()


# Statements of a request


@pytest.mark.parametrize("level", [None, "serializable"])
def test_plain_view_costs_two_statements_and_its_replay_one(
    level: str | None, serve: Serve, client: Any, transactional_db: None
) -> None:
    serve(
        view=plain(
            lambda request: HttpResponse(status=201), scope=lambda request: "one", isolation=level
        )
    )
    post = partial(client.post, "/view/", headers={"Idempotency-Key": "key-1"})
    connection.ensure_connection()
    with statements() as first:
        assert post().status_code == 201
    assert verbs(first) == ["BEGIN", *_CLAIM, "UPDATE", "COMMIT"]
    with statements() as replay:
        assert post()["Idempotent-Replayed"] == "true"
    assert verbs(replay) == ["BEGIN", *_CLAIM, *_READ, "COMMIT"]


def test_phased_view_costs_a_claim_and_its_replay_one_statement(
    serve: Serve, client: Any, transactional_db: None
) -> None:
    serve(view=phased(lambda request: HttpResponse(status=201), scope=lambda request: "one"))
    post = partial(client.post, "/view/", headers={"Idempotency-Key": "key-1"})
    connection.ensure_connection()
    with statements() as first:
        assert post().status_code == 201
    assert verbs(first) == [*_READ, *_CLAIM, "BEGIN", "UPDATE", "COMMIT"]
    with statements() as replay:
        assert post()["Idempotent-Replayed"] == "true"
    assert len(replay) == 1


POSTGRESQL = "postgresql" in connection.settings_dict["ENGINE"]
#: PostgreSQL reads and inserts in one statement, WITH; SQLite has no INSERT inside WITH.
_CLAIM = ["WITH"] if POSTGRESQL else ["INSERT"]
_READ = [] if POSTGRESQL else ["SELECT"]


def verbs(queries: Iterable[dict[str, str]]) -> list[str]:
    """Return the first word of each statement; for a fenced statement that ends a transaction, of
    the wrapped statement."""
    texts = [query["sql"] for query in sent(queries)]
    if POSTGRESQL:  # On SQLite a text contains the values, which may contain the separator.
        texts = [
            text.removeprefix("WITH here AS (") for message in texts for text in message.split("; ")
        ]
    return [text.split()[0] for text in texts if not text.startswith(("SET ", "SHOW "))]


@both_kinds
@pytest.mark.postgres
@pytest.mark.parametrize("locked", [False, True])
def test_replay_writes_nothing_and_locks_nothing(
    locked: bool, kind: Kind, serve: Serve, sender: Sender
) -> None:
    def row() -> tuple[Any, ...]:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT ctid::text, xmin::text, xmax::text, locked_until FROM"
                " idempotency_idempotencykey"
            )
            return cursor.fetchone()

    serve(view=kind(Counted()))
    sender.send()
    if locked:
        IdempotencyKey.objects.update(locked_until=F("expires_at"))
    before = row()
    around_a_test = transaction.atomic()
    around_a_test._from_testcase = True
    with around_a_test:
        assert sender.send()["Idempotent-Replayed"] == "true"
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_current_xact_id_if_assigned()")
            assert cursor.fetchone() == (None,)
    assert row() == before
