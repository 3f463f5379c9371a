"""System checks find mistakes before the first request."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.decorators import login_required
from django.contrib.auth.mixins import AccessMixin, LoginRequiredMixin
from django.contrib.auth.views import LoginView
from django.core.checks import run_checks
from django.core.validators import RegexValidator
from django.db import connections, transaction
from django.http import HttpResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST
from rest_framework.views import APIView

from idempotency import scopes
from idempotency.contrib.rest_framework import render_error
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey, ProcessedMessage
from tests.frameworks.kinds import KINDS, Job
from tests.kit.commands import run
from tests.kit.database import default_isolation
from tests.kit.shards import EntriesInShardB

RIGHT = {"*": "idempotency.contrib.rq.RQBackend", "mail": "tests.kit.jobs.PickyBackend"}


def found(settings, **values):
    """Return the ids of the check messages for these settings, without database checks."""
    settings.IDEMPOTENCY = values
    return [
        message.id
        for message in run_checks(databases=[])
        if (message.id or "").startswith("idempotency.")
    ]


def test_the_defaults_and_right_settings_pass(settings):
    assert found(settings) == []
    assert found(settings, ENQUEUERS=RIGHT, RETENTION_HOURS=24) == []


@pytest.mark.parametrize(
    "values",
    [
        {"RETENTION_HUORS": 72},
        {"KEY_MAX_LENGTH": 256},
        {"LOCK_TIMEOUT_SECONDS": "90"},
        {"ENQUEUERS": ["rq"]},
        {"ENQUEUERS": {}},
        {"PHASE_ISOLATION": "high"},
        {"CONFIRM_REPLICATED": "disk"},
        {"CONFIRM_REPLICATED": 1},
    ],
)
def test_a_setting_that_cannot_be_right_is_an_error(settings, values):
    assert found(settings, **values) == ["idempotency.E001"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("IDEMPOTENCE", "IDEMPOTENCY?"),
        ("IDEMPOTENT", "IDEMPOTENCY?"),
        ("IDEMPOTENCY_LOCK_TIMEOUT_SECONDS", "{'LOCK_TIMEOUT_SECONDS': ...}?"),
    ],
)
def test_a_setting_with_nearly_the_right_name_is_reported(settings, name, hint):
    setattr(settings, name, 60)
    [message] = [each for each in run_checks(databases=[]) if each.id == "idempotency.W021"]
    assert f"The setting {name} is not" in message.msg
    assert message.hint.endswith(hint)


NOT_INSTALLED = """
import django
from django.conf import settings

settings.configure()
django.setup()
from idempotency.decorators import idempotent
"""


@pytest.mark.processes
def test_an_import_without_the_app_names_the_setting():
    ended = subprocess.run(
        [sys.executable, "-c", NOT_INSTALLED], capture_output=True, text=True, timeout=60
    )
    assert ended.stderr.rstrip().endswith(
        "Add 'idempotency' to INSTALLED_APPS, and run manage.py migrate."
    )


def test_a_setting_of_another_package_or_of_the_project_itself_is_not_reported(settings):
    settings.IDEMPOTENCY_KEY = {}
    settings.IDEMPOTENCY_RETENTION_HOURS = 96
    assert found(settings, RETENTION_HOURS=96) == []


def test_settings_that_are_no_dict_are_an_error(settings):
    settings.IDEMPOTENCY = ["RETENTION_HOURS"]
    assert "idempotency.E001" in [message.id for message in run_checks(databases=[])]


@pytest.mark.parametrize(
    "path",
    ["nowhere.Backend", "idempotency.contrib.rq.Nothing", "idempotency.models.StagedJob", "nodots"],
)
def test_a_backend_that_is_none_is_an_error_that_names_it(settings, path):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"mail": path}}
    [message] = [
        message for message in run_checks(databases=[]) if message.id == "idempotency.E003"
    ]
    assert repr(path) in message.msg
    assert "'mail'" in message.msg


@pytest.mark.parametrize("name", ["KEY_VALIDATOR", "ERROR_RENDERER", "PREPARE_REQUEST"])
@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nowhere.render", "ModuleNotFoundError: No module named 'nowhere'"),
        ("idempotency.contrib.stripe_errors.rendr", "ImportError"),
        ("nodots", "ImportError"),
        ("idempotency.conf", "it is of type module"),
    ],
)
def test_a_dotted_path_to_nothing_that_can_be_called_is_an_error_that_names_it(
    settings, name, path, problem
):
    assert found(settings, **{name: path}) == ["idempotency.E012"]
    [message] = [
        message for message in run_checks(databases=[]) if message.id == "idempotency.E012"
    ]
    assert f"IDEMPOTENCY[{name!r}] is {path!r}, which cannot be called: {problem}" in message.msg


def test_a_class_of_validators_is_an_error_since_it_would_take_every_key(settings):
    assert found(settings, KEY_VALIDATOR="django.core.validators.RegexValidator") == [
        "idempotency.E012"
    ]
    assert found(settings, KEY_VALIDATOR=RegexValidator) == ["idempotency.E001"]
    assert (
        found(settings, KEY_VALIDATOR=RegexValidator("^[a-z]$"), ERROR_RENDERER=render_error) == []
    )


def test_a_callable_and_its_dotted_path_are_right(settings):
    assert (
        found(
            settings,
            ERROR_RENDERER="idempotency.contrib.stripe_errors.render",
            PREPARE_REQUEST=print,
        )
        == []
    )
    assert (
        found(settings, KEY_VALIDATOR="django.core.validators.validate_slug", PREPARE_REQUEST=None)
        == []
    )


@pytest.mark.parametrize("value", [True, "storage"])
def test_a_confirmation_that_no_database_can_give_is_a_warning(settings, value):
    vendor = connections["default"].vendor
    assert found(settings, CONFIRM_REPLICATED=value) == (
        ["idempotency.W014"] if vendor == "sqlite" else []
    )


def test_a_completer_that_may_meet_the_client_is_a_warning(settings):
    assert found(settings, COMPLETER_MIN_AGE_SECONDS=90) == ["idempotency.W001"]
    assert found(settings, COMPLETER_MIN_AGE_SECONDS=91) == []


class KeysElsewhere:
    """A router that sends the keys to a database of an unsupported kind."""

    def db_for_write(self, model, **hints):
        return "elsewhere" if model is IdempotencyKey else None


def test_a_database_without_the_promises_is_an_error(settings, monkeypatch):
    dummy = connections.configure_settings({"default": {}, "elsewhere": {}})["elsewhere"]
    monkeypatch.setitem(connections.settings, "elsewhere", dummy)
    settings.DATABASE_ROUTERS = ["tests.request.test_checks.KeysElsewhere"]
    assert set(found(settings)) == {
        "idempotency.E002",
        "idempotency.E009",
        "idempotency.W011",
        "idempotency.W020",
    }


class MessagesElsewhere:
    def db_for_write(self, model, **hints):
        return "shard_b" if model is ProcessedMessage else None


def test_a_router_that_parts_what_commits_together_is_an_error(settings):
    settings.DATABASE_ROUTERS = ["tests.request.test_checks.MessagesElsewhere"]
    assert found(settings) == ["idempotency.E009"]


@pytest.mark.parametrize("method", ["db_for_write", "allow_migrate"])
def test_a_foreign_key_from_another_database_is_a_warning(settings, method):
    settings.DATABASE_ROUTERS = [SimpleNamespace(**{method: getattr(EntriesInShardB(), method)})]
    assert found(settings) == ["idempotency.W020"]


@pytest.mark.processes
def test_the_checks_ask_no_database():
    done = run("check", DATABASE_URL="postgresql://postgres@127.0.0.1:1/nowhere")
    assert done.returncode == 0, done.stderr


def said(settings, *views, **values):
    """Return the ids of the check messages for these views."""
    settings.ROOT_URLCONF = type(
        "Urls", (), {"urlpatterns": [path(f"{number}/", view) for number, view in enumerate(views)]}
    )
    return found(settings, **values)


def answer(request):
    return HttpResponse()


class Answering(View):
    def post(self, request):
        return HttpResponse()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_kind_of_view_is_a_false_alarm(kind, settings, monkeypatch):
    patterns = [
        pattern
        for phased in (False, True)
        for pattern in kind.patterns(Job(work=None, options={}, phased=phased))
    ]
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": patterns})
    # the token cannot be checked again
    notes = {"idempotency.I002"} if kind.name.startswith("Ninja") else set()
    assert set(found(settings)) == notes
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    assert set(found(settings)) == notes
    settings.MIDDLEWARE = []
    assert set(found(settings)) <= {"idempotency.W006"} | notes


def test_a_completer_that_comes_after_the_reaper_is_a_warning(settings):
    assert found(settings, COMPLETER_MIN_AGE_SECONDS=24 * 3600, RETENTION_HOURS=24) == [
        "idempotency.W002"
    ]


def test_a_database_without_autocommit_is_an_error(settings, monkeypatch):
    monkeypatch.setitem(connections["default"].settings_dict, "AUTOCOMMIT", False)
    assert found(settings) == ["idempotency.E006"]


@pytest.mark.parametrize(
    ("name", "wanted"), [("rq.RQBackend", "W003"), ("tasks.TasksBackend", "E004")]
)
def test_a_backend_without_its_app_is_found(settings, name, wanted):
    backend = {"*": f"idempotency.contrib.{name}"}
    assert found(settings, ENQUEUERS=backend) == []
    settings.INSTALLED_APPS = [
        app for app in settings.INSTALLED_APPS if app not in ("django_rq", "django_tasks_db")
    ]
    assert found(settings, ENQUEUERS=backend) == [f"idempotency.{wanted}"]


def test_a_database_that_is_none_is_an_error(settings):
    assert said(settings, idempotent(using="elsewhere")(answer)) == ["idempotency.E005"]
    assert (
        said(
            settings,
            idempotent(using="default")(answer),
            idempotent(using=lambda request: "elsewhere")(answer),
        )
        == []
    )


def test_dispatch_of_a_class_that_checks_access_is_an_error(settings):
    whole = method_decorator(idempotent, name="dispatch")
    checked = whole(type("Checked", (LoginRequiredMixin, Answering), {}))
    assert said(settings, checked.as_view()) == ["idempotency.E007"]
    assert said(settings, whole(type("Rest", (APIView,), {"post": answer})).as_view()) == [
        "idempotency.E007"
    ]
    assert said(settings, whole(type("Unchecked", (Answering,), {})).as_view()) == []
    # A mixin may check nothing in dispatch().
    assert (
        said(settings, whole(type("CheckedInPost", (AccessMixin, Answering), {})).as_view()) == []
    )


def in_transaction(**options):
    """Return a class whose method is protected inside a transaction."""
    post = transaction.atomic(idempotent(**options)(lambda self, request: HttpResponse()))
    return login_required(type("InTransaction", (View,), {"post": post}).as_view())


@pytest.mark.parametrize(
    "view",
    [
        transaction.atomic(idempotent(recovery_points=[])(answer)),
        in_transaction(recovery_points=[]),
    ],
)
def test_a_transaction_around_a_phased_view_is_an_error(settings, view):
    assert said(settings, view) == ["idempotency.E008"]


@pytest.mark.postgres  # CONFIRM_REPLICATED is a warning on SQLite.
@pytest.mark.parametrize("view", [transaction.atomic(idempotent(answer)), in_transaction()])
def test_a_transaction_around_a_plain_view_is_an_error_only_if_commits_are_confirmed(
    settings, view
):
    assert said(settings, view) == []
    assert said(settings, view, CONFIRM_REPLICATED="storage") == ["idempotency.E008"]


def test_a_transaction_elsewhere_is_none(settings):
    assert (
        said(
            settings,
            idempotent(transaction.atomic(answer)),
            transaction.atomic("other")(idempotent(answer)),
        )
        == []
    )


@pytest.mark.parametrize(
    "view",
    [require_GET(idempotent(answer)), type("Gets", (View,), {"get": idempotent(answer)}).as_view()],
)
def test_a_view_for_safe_methods_alone_is_a_warning(settings, view):
    assert said(settings, view) == ["idempotency.W004"]


@pytest.mark.parametrize("protect", [lambda view: view, login_required, require_POST, csrf_exempt])
def test_a_login_view_without_a_scope_is_a_warning(settings, protect):
    for scope in (None, scopes.user_or_session):
        assert said(settings, protect(idempotent(scope=scope)(LoginView.as_view()))) == [
            "idempotency.W005"
        ]
    assert said(settings, protect(idempotent(scope=scopes.session)(LoginView.as_view()))) == []


@pytest.mark.parametrize("scope", [None, scopes.session])
def test_a_project_without_users_and_sessions_needs_a_scope(settings, scope):
    view = csrf_exempt(idempotent(scope=scope)(answer))
    assert said(settings, view) == []
    settings.MIDDLEWARE = ["django.middleware.common.CommonMiddleware"]
    assert said(settings, view) == ["idempotency.W006"]
    assert said(settings, idempotent(scope=scopes.attribute("tenant.pk"))(answer)) == []


@pytest.mark.parametrize(
    ("scope", "wanted"),
    [
        (scopes.attribute("tenant"), []),
        (scopes.attribute("tenant.pk"), ["idempotency.W009"]),
        (scopes.attribute("user.pk"), ["idempotency.W009"]),
        (scopes.joined(scopes.attribute("tenant.pk"), scopes.session), ["idempotency.W009"]),
        (scopes.joined(scopes.attribute("tenant.pk"), scopes.user), []),
        (scopes.attribute("user.company_id"), []),
        (lambda request: "all", []),
        (None, []),
    ],
)
def test_a_sender_whom_the_completer_cannot_name_is_a_warning(settings, scope, wanted):
    assert said(settings, idempotent(scope=scope)(answer)) == [], "the completer runs no plain view"
    phased = idempotent(scope=scope, recovery_points=[], keep=["tenant", "tenant.pk"])(answer)
    assert said(settings, phased) == wanted
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": print}
    assert [
        message.id for message in run_checks(databases=[]) if message.id == "idempotency.W009"
    ] == []


@pytest.mark.parametrize(
    ("engine", "wanted"), [("signed_cookies", ["idempotency.E011"]), ("db", [])]
)
def test_the_session_as_scope_needs_sessions_that_can_be_told_apart(settings, engine, wanted):
    settings.SESSION_ENGINE = f"django.contrib.sessions.backends.{engine}"
    assert said(settings, idempotent(scope=scopes.session)(answer)) == wanted
    assert said(settings, idempotent(answer), idempotent(scope=scopes.user)(answer)) == [], (
        "all may be signed in"
    )


def test_a_middleware_of_the_project_may_say_who_asks(settings):
    settings.MIDDLEWARE = ["rides_demo.middleware.Tokens"]
    assert said(settings, idempotent(answer)) == []


class HalfProtected(Answering):
    @idempotent
    def put(self, request):
        return HttpResponse()

    @idempotent(wait_seconds=1)
    def patch(self, request):
        return HttpResponse()

    @transaction.atomic
    def delete(self, request):
        return HttpResponse()


def test_methods_that_lose_their_transaction_are_a_warning(settings, monkeypatch):
    assert said(settings, HalfProtected.as_view()) == []
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    assert said(settings, HalfProtected.as_view(), idempotent(answer)) == ["idempotency.W008"]
    [message] = [
        message for message in run_checks(databases=[]) if message.id == "idempotency.W008"
    ]
    assert "runs POST outside" in message.msg


def test_a_retention_without_effect_is_a_warning(settings):
    for hours in (72, 87_600):
        assert said(settings, idempotent(retention_hours=hours)(answer)) == []
    assert said(settings, idempotent(retention_hours=71)(answer)) == ["idempotency.W016"]


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("setting", ["PHASE_ISOLATION", "PLAIN_ISOLATION"])
def test_a_level_beside_that_of_the_other_transactions_is_a_warning(settings, setting):
    def found():
        return [
            message.id
            for message in run_checks(databases=["default"])
            if message.id == "idempotency.W017"
        ]

    for level, wanted in (
        (None, []),
        ("read committed", []),
        ("serializable", ["idempotency.W017"]),
    ):
        settings.IDEMPOTENCY = {setting: level}
        assert found() == wanted
    with default_isolation("serializable"):
        assert found() == []


def deployed():
    """Return the ids of the additional messages of ``check --deploy``."""
    every = {message.id for message in run_checks(include_deployment_checks=True, databases=[])}
    return {
        name
        for name in every - {message.id for message in run_checks(databases=[])}
        if name.startswith("idempotency.")
    }


def test_deployment_is_looked_at_when_asked(monkeypatch):
    options = {"prepare_threshold": None}
    monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", options)
    vendor = connections["default"].vendor
    assert deployed() == ({"idempotency.W007"} if vendor == "sqlite" else set())
    del options["prepare_threshold"]
    assert deployed() == {"idempotency.W007" if vendor == "sqlite" else "idempotency.W015"}


def test_every_check_is_documented():
    root = Path(__file__).parents[2]
    documented = re.findall(
        r"^\| `(idempotency\.[EWI]\d{3})` \|", (root / "docs" / "reference.md").read_text(), re.M
    )
    assert documented == sorted(set(documented))
    modules = (
        "checks/__init__.py",
        "checks/databases.py",
        "checks/operations.py",
        "checks/settings.py",
        "checks/views.py",
        "contrib/ninja.py",
        "_engine/database_product.py",
    )
    code = "".join((root / "idempotency" / name).read_text() for name in modules)
    assert set(documented) == set(re.findall(r'"(idempotency\.[EWI]\d{3})"', code))


class UsersElsewhere:
    """A router that sends only users to another database."""

    def db_for_write(self, model, **hints):
        return "other" if model is get_user_model() else None


def test_users_in_another_database_than_the_keys_are_a_warning(settings, monkeypatch):
    monkeypatch.setitem(connections.settings, "other", connections.settings["default"])
    views = [
        idempotent(answer),
        idempotent(scope=scopes.user)(answer),
        idempotent(recovery_points=[])(answer),
    ]
    assert said(settings, *views) == []
    settings.DATABASE_ROUTERS = [UsersElsewhere()]
    assert said(settings, *views) == ["idempotency.W011"] * 3
    apart = scopes.joined(scopes.attribute("tenant.pk"), scopes.user)
    named = [idempotent(scope=scope)(answer) for scope in (scopes.session, apart)]
    assert (
        said(
            settings,
            *named,
            idempotent(using="other")(answer),
            idempotent(using=lambda request: "default")(answer),
        )
        == []
    )
