"""Number 59: wrappers of ``connection.execute_wrapper()``, and whatever else takes part in Django's
cursors."""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection, connections
from django.db.backends.postgresql.base import Cursor
from django.db.backends.utils import CursorWrapper
from django.http import HttpRequest, HttpResponseBase
from pytest_django import Settings

from idempotency.inbox import process_once
from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender
from tests.kit.views import Counted, View, both_kinds, create, two_phases
from tests.kit.wrappers import SETTERS, WRAPPERS, Wrapper, comment, in_front
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)
postgres = pytest.mark.postgres
Kind = Callable[..., View]
Serve = Callable[..., None]

each_wrapper = pytest.mark.parametrize(
    "wrapper",
    [
        pytest.param(each, id=each.__name__, marks=[postgres] if each in SETTERS else [])
        for each in WRAPPERS
    ],
)
merged_or_not = pytest.mark.parametrize("merged", [True, False], ids=["merged", "one by one"])


@pytest.fixture
def contexts() -> Iterator[Callable[[], list[str]]]:
    """Return a function that returns the context in which each row of a key was written, by a
    trigger."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE test_context (id serial, value text)")
        cursor.execute(
            "CREATE FUNCTION note_context() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT"
            " INTO test_context (value) VALUES (current_setting('test.context', true)); RETURN"
            " NULL; END $$"
        )
        cursor.execute(
            "CREATE TRIGGER note_context AFTER INSERT OR UPDATE ON idempotency_idempotencykey "
            "FOR EACH ROW EXECUTE FUNCTION note_context()"
        )

    def read() -> list[str]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT value FROM test_context ORDER BY id")
            return [value for (value,) in cursor.fetchall()]

    yield read
    with connection.cursor() as cursor:
        cursor.execute("DROP FUNCTION note_context CASCADE")
        cursor.execute("DROP TABLE test_context")


def begin(request: HttpRequest) -> None:
    """Write an entry without a key."""
    Entry.objects.create(name="first")


def run_and_replay(sender: Sender) -> list[tuple[int, bool]]:
    answers = [sender.send() for _ in range(2)]
    return [(answer.status_code, "Idempotent-Replayed" in answer) for answer in answers]


@each_wrapper
@both_kinds
@merged_or_not
def test_59_a_wrapper_gets_statements_as_from_the_orm(
    merged: bool, kind: Kind, wrapper: Wrapper, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"MERGE_ROUND_TRIPS": merged}
    serve(view=kind(counted := Counted()))
    with connection.execute_wrapper(wrapper):
        assert run_and_replay(sender) == [(201, False), (201, True)]
    assert (counted.runs, Entry.objects.count(), IdempotencyKey.objects.finished().count()) == (
        1,
        1,
        1,
    )
    connection.close()  # A wrapper has set what belongs to a session.


@postgres
@pytest.mark.parametrize("wrapper", SETTERS, ids=lambda wrapper: wrapper.__name__)
@both_kinds
def test_59_what_a_wrapper_sets_holds_for_the_writes_of_the_key(
    kind: Kind, wrapper: Wrapper, serve: Serve, sender: Sender, contexts: Callable[[], list[str]]
) -> None:
    serve(view=kind(create))
    with connection.execute_wrapper(wrapper):
        assert sender.send().status_code == 201
    assert contexts() == ["request 7"] * 2
    connection.close()


@postgres
@both_kinds
def test_59_a_wrapper_sees_each_statement_alone_and_no_begin_or_commit(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    seen: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        assert isinstance(context["cursor"], CursorWrapper)
        assert isinstance(params, tuple | None)
        assert not many
        seen.append(sql)
        return execute(sql, params, many, context)

    serve(view=kind(create))
    with connection.execute_wrapper(note):
        assert sender.send().status_code == 201
    assert [
        text for text in seen if ";" in text or text.startswith(("BEGIN", "SET", "COMMIT"))
    ] == []
    _claim, finish = [text for text in seen if "idempotency_idempotencykey" in text]
    assert finish.startswith("UPDATE")
    assert "/ (" not in finish


@postgres
@each_wrapper
@both_kinds
def test_59_a_wrapper_that_the_view_installs_gets_the_statements_after_it(
    kind: Kind, wrapper: Wrapper, serve: Serve, sender: Sender, contexts: Callable[[], list[str]]
) -> None:
    def work(request: HttpRequest) -> HttpResponseBase:
        connection.execute_wrappers.append(wrapper)
        return create(request)

    serve(view=kind(work))
    try:
        assert sender.send().status_code == 201
    finally:
        connection.execute_wrappers.clear()
    assert sender.send()["Idempotent-Replayed"] == "true"
    assert contexts()[1] == ("request 7" if wrapper in SETTERS else contexts()[0])
    connection.close()


@postgres
@both_kinds
def test_59_a_wrapper_that_the_view_removes_changes_nothing(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponseBase:
        connection.execute_wrappers.clear()
        return create(request)

    serve(view=kind(work))
    connection.execute_wrappers.append(WRAPPERS[0])
    assert run_and_replay(sender) == [(201, False), (201, True)]


@postgres
@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
@both_kinds
def test_59_a_wrapper_that_raises_leaves_work_and_response_or_neither(
    kind: Kind, after: bool, serve: Serve, sender: Sender
) -> None:
    """At each statement on the key, before or after it is sent."""

    def failing_at(number: int) -> tuple[Wrapper, Callable[[], bool]]:
        passed = 0

        def fail(execute: Any, sql: str, *more: Any) -> Any:
            nonlocal passed
            passed += "idempotency_idempotencykey" in sql
            if passed == number and not after:
                raise ZeroDivisionError("of the wrapper")
            result = execute(sql, *more)
            if passed == number:
                raise ZeroDivisionError("of the wrapper")
            return result

        return fail, lambda: passed >= number

    serve(view=kind(create))
    number, met = 0, True
    while met:
        number += 1
        wrapper, was_met = failing_at(number)
        with connection.execute_wrapper(wrapper):
            status = sender.send(key=f"key-{number}").status_code
        met = was_met()
        assert status == (500 if met else 201)
        finished = IdempotencyKey.objects.finished().filter(idempotency_key=f"key-{number}")
        assert (
            Entry.objects.filter(idempotency_key__in=finished).count()
            == finished.count()
            == (not met)
        )
        IdempotencyKey.objects.filter(locked_until__isnull=False).update(locked_until=None)
        assert sender.send(key=f"key-{number}").status_code == 201
    assert number >= 3
    assert Entry.objects.count() == number


@postgres
def test_59_a_late_run_under_a_wrapper_commits_nothing(serve: Serve, sender: Sender) -> None:
    """Also under one that leaves its own result in front of that of the statement."""

    def lose(request: HttpRequest) -> HttpResponseBase:
        with connection.cursor() as cursor:  # Like a commit of another session.
            cursor.execute("UPDATE idempotency_idempotencykey SET claim_token = %s", [uuid4()])
        return create(request)

    for number, wrapper in enumerate([*WRAPPERS, in_front]):
        serve(view=two_phases(begin, lose))
        with connection.execute_wrapper(wrapper):
            assert sender.send(key=f"key-{number}").status_code == 409
        assert Entry.objects.count() == number + 1
    assert not IdempotencyKey.objects.finished().exists()
    connection.close()


@postgres
def test_59_a_division_by_zero_of_a_wrapper_is_not_a_lost_lock(
    serve: Serve, sender: Sender
) -> None:
    failures = iter(["SELECT 1 / 0; "])

    def divide(execute: Any, sql: str, *more: Any) -> Any:
        return execute(next(failures, "") + sql if sql.startswith("UPDATE") else sql, *more)

    serve(view=two_phases(begin, create))
    with connection.execute_wrapper(divide):
        assert sender.send().status_code == 500
    assert Entry.objects.count() == 0
    assert sender.send().status_code == 201
    assert Entry.objects.count() == 2


@postgres
@pytest.mark.parametrize("wrapper", [*WRAPPERS, in_front], ids=lambda wrapper: wrapper.__name__)
def test_59_a_message_takes_effect_once_under_a_wrapper(wrapper: Wrapper) -> None:
    def deliver() -> bool:
        with connection.execute_wrapper(wrapper), process_once("stripe", "evt_1") as first:
            return first

    assert [deliver() for _ in range(2)] == [True, False]
    connection.close()


@postgres
@both_kinds
def test_59_a_wrapper_over_server_side_binding(kind: Kind, serve: Serve, sender: Sender) -> None:
    former = connections["default"]
    options = former.settings_dict["OPTIONS"] | {"server_side_binding": True}
    connections["default"] = other = type(former)(
        former.settings_dict | {"OPTIONS": options}, "default"
    )
    serve(view=kind(create))
    try:
        with connection.execute_wrapper(comment):
            assert run_and_replay(sender) == [(201, False), (201, True)]
    finally:
        other.close()
        connections["default"] = former


class Counting(Cursor):
    """A cursor as django-prometheus and the instrumentation of OpenTelemetry make it."""

    seen: list[str] = []

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the statement."""
        self.seen.append(query)
        return super().execute(query, *args, **kwargs)


def by_factory(patched: pytest.MonkeyPatch) -> None:
    """Let the connection make other cursors."""
    connection.ensure_connection()
    patched.setattr(connection.connection, "cursor_factory", Counting)


def by_method(patched: pytest.MonkeyPatch) -> None:
    """Replace the method of the connection, as the debug toolbar does."""
    original = connection.cursor

    class Noting(CursorWrapper):
        def execute(self, sql: Any, params: Any = None) -> Any:
            Counting.seen.append(sql)
            return super().execute(sql, params)

    def cursor() -> Noting:
        made = original()
        return Noting(made.cursor, made.db)

    patched.setattr(connection, "cursor", cursor)


def by_class_of_connection(patched: pytest.MonkeyPatch) -> None:
    """Use a class of connections with a method of its own, as backends of tenants and of metrics
    do."""

    class Backend(type(connection._connections["default"])):  # type: ignore[misc]
        def _cursor(self, name: str | None = None) -> Any:
            made = super()._cursor(name)
            made.execute("SELECT 'of the backend'")
            return made

        def make_cursor(self, cursor: Any) -> Any:
            made = super().make_cursor(cursor)
            Counting.seen.append("idempotency_idempotencykey")
            return made

    patched.setattr(connection._connections["default"], "__class__", Backend)


def by_class_of_cursors(patched: pytest.MonkeyPatch) -> None:
    """Patch the class of Django, as django-cachalot does."""
    original = CursorWrapper.execute

    def execute(self: CursorWrapper, sql: Any, params: Any = None) -> Any:
        Counting.seen.append(sql)
        return original(self, sql, params)

    patched.setattr(CursorWrapper, "execute", execute)


@postgres
@both_kinds
@pytest.mark.parametrize(
    "replace", [by_factory, by_method, by_class_of_connection, by_class_of_cursors]
)
def test_59_replaced_cursors_and_connections_see_the_statements(
    replace: Callable[..., None],
    kind: Kind,
    serve: Serve,
    sender: Sender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve(view=kind(create))
    Counting.seen.clear()
    with monkeypatch.context() as patched:
        replace(patched)
        assert sender.send().status_code == 201
    seen = [text for text in Counting.seen if "idempotency_idempotencykey" in text]
    assert len(seen) >= 2
    assert sender.send()["Idempotent-Replayed"] == "true"


@postgres
@both_kinds
def test_59_the_debug_log_has_each_statement(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.DEBUG = True
    serve(view=kind(create))
    with connection.execute_wrapper(WRAPPERS[0]):
        assert run_and_replay(sender) == [(201, False), (201, True)]
    assert sender.send(key="another").status_code == 201
