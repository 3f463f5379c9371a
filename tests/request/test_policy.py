"""The walk over the URLs finds protected views of every kind, each with its effective methods and
options."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
from django.contrib.auth.decorators import login_required
from django.core.validators import RegexValidator
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.test import override_settings
from django.urls import include, path, re_path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_http_methods, require_POST
from ninja import NinjaAPI
from rest_framework import generics

from idempotency.decorators import idempotent
from idempotency.policy import (
    OperationPolicy,
    Policy,
    operation_policies,
    policies,
    protected_views,
    unprotected,
)
from tests.frameworks.kinds import KINDS, Job, Kind
from tests.kit.commands import run, run_here

UNSAFE = ("POST", "PUT", "PATCH", "DELETE")


def answer(request: HttpRequest, **kwargs: Any) -> HttpResponseBase:
    """Return an empty response."""
    return HttpResponse()


def found(*patterns: Any) -> list[Policy]:
    """Return the policies of these URLs."""
    return list(policies(type("Urls", (), {"urlpatterns": list(patterns)})))


@pytest.mark.parametrize(
    ("decorated", "methods"),
    [
        (idempotent(answer), UNSAFE),
        (require_POST(idempotent(answer)), ("POST",)),
        (csrf_exempt(login_required(require_POST(idempotent(answer)))), ("POST",)),
        (idempotent(require_http_methods(["GET", "PUT"])(answer)), ("PUT",)),
    ],
)
def test_a_function_is_protected_for_the_unsafe_methods_that_reach_it(
    decorated: Callable[..., HttpResponseBase], methods: tuple[str, ...]
) -> None:
    [policy] = found(path("rides", decorated))
    assert (policy.methods, policy.path, policy.view) == (
        methods,
        "/rides",
        "tests.request.test_policy.answer",
    )


@method_decorator(idempotent, name="create")
class CreateOrder(generics.CreateAPIView):
    """A generic view of Django REST framework, whose ``post()`` is inherited and calls
    ``create()``."""


def test_a_generic_view_is_protected_by_the_handler_that_its_method_calls() -> None:
    [policy] = found(path("orders", CreateOrder.as_view()))
    assert (policy.methods, policy.path) == (("POST",), "/orders")


def test_what_is_not_protected_has_no_policy() -> None:
    assert (
        found(
            path("a", answer), path("b", View.as_view()), path("c", require_GET(idempotent(answer)))
        )
        == []
    )


def unprotected_in(*patterns: Any) -> list[tuple[str, tuple[str, ...]]]:
    """Return the path and the methods of each view that takes unsafe methods without protection."""
    return [
        (view.path, view.methods)
        for view in unprotected(type("Urls", (), {"urlpatterns": list(patterns)}))
    ]


class Half(View):
    """A class that protects one of two methods."""

    @idempotent
    def post(self, request: HttpRequest) -> HttpResponseBase:
        return HttpResponse()

    def delete(self, request: HttpRequest) -> HttpResponseBase:
        return HttpResponse()


def test_views_that_take_unsafe_methods_without_protection_are_found() -> None:
    api = NinjaAPI(urls_namespace="unprotected", docs_url=None, openapi_url=None)
    api.post("/pay")(lambda request: None)
    api.get("/rides")(lambda request: None)
    assert unprotected_in(
        path("a", answer),
        path("b", require_POST(answer)),
        path("c", require_GET(answer)),
        path("d", idempotent(answer)),
        path("e", Half.as_view()),
        path("f", generics.CreateAPIView.as_view()),
        path("api/", api.urls),
    ) == [
        ("/a", UNSAFE),
        ("/b", ("POST",)),
        ("/e", ("DELETE",)),
        ("/f", ("POST",)),
        ("/api/pay", ("POST",)),
        ("/api/", UNSAFE),
    ]


class PerMethod(View):
    """A class whose methods have different options."""

    def get(self, request: HttpRequest) -> HttpResponseBase:
        return HttpResponse()

    @idempotent(recovery_points=["paid"])
    def post(self, request: HttpRequest) -> HttpResponseBase:
        return HttpResponse()

    @idempotent(required=False)
    def put(self, request: HttpRequest) -> HttpResponseBase:
        return HttpResponse()

    @idempotent(required=False)
    def patch(self, request: HttpRequest) -> HttpResponseBase:
        return HttpResponse()


def test_methods_of_a_class_have_a_policy_for_each_set_of_options() -> None:
    of_methods = {
        policy.methods: policy for policy in found(path("", login_required(PerMethod.as_view())))
    }
    assert of_methods.keys() == {("POST",), ("PUT", "PATCH")}
    assert of_methods["POST",].recovery_points == ("started", "paid", "finished")
    assert of_methods["POST",].isolation == "the connection's own"
    assert of_methods["PUT", "PATCH"].required is False
    assert of_methods["PUT", "PATCH"].recovery_points == ()
    assert {policy.view for policy in of_methods.values()} == {
        "tests.request.test_policy.PerMethod"
    }


def test_a_class_that_is_protected_as_a_whole_is_so_for_the_methods_that_it_has() -> None:
    whole = method_decorator(idempotent, name="dispatch")(
        type("Whole", (View,), {"post": answer, "get": answer})
    )
    assert [policy.methods for policy in found(path("", whole.as_view()))] == [("POST",)]
    assert found(path("", whole.as_view(http_method_names=["get"]))) == []


def test_paths_and_names_hold_what_includes_and_namespaces_add() -> None:
    inner = [
        path("rides/<int:pk>/", idempotent(answer), name="ride"),
        re_path(r"^r/(?P<pk>[0-9]+)/$", idempotent(answer)),
    ]
    policies_of = found(path("api/", include((inner, "rides"), namespace="v1")))
    assert [(policy.path, policy.name) for policy in policies_of] == [
        ("/api/rides/<int:pk>/", "v1:ride"),
        ("/api/r/<pk>/", ""),
    ]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_view_is_found(kind: Kind) -> None:
    def of_kind(phased: bool) -> Iterator[Policy]:
        job = Job(work=lambda request: None, options={}, phased=phased)
        return iter(found(*kind.patterns(job)))

    methods: dict[str, set[str]] = {}
    for policy in of_kind(phased=False):
        assert policy.recovery_points == ()
        methods.setdefault(policy.path, set()).update(policy.methods)
    assert methods["/view/"] >= {"POST", "PUT"}
    assert "POST" in methods["/other/"]
    assert {policy.recovery_points for policy in of_kind(phased=True)} == {
        ("started", "made", "called", "finished")
    }


def test_a_protected_view_for_safe_methods_alone_is_seen_by_the_checks() -> None:
    urls = type("Urls", (), {"urlpatterns": [path("", require_GET(idempotent(answer)))]})
    assert [view.methods for view in protected_views(urls)] == [()]


def test_a_validator_that_is_an_object_stands_in_the_policy_by_its_class() -> None:
    with override_settings(IDEMPOTENCY={"KEY_VALIDATOR": RegexValidator("^[a-z]+$")}):
        [policy] = found(path("", idempotent(answer)))
    assert policy.key_validator == "django.core.validators.RegexValidator"


def test_options_and_settings_stand_in_the_policy() -> None:
    given = {
        "HEADER_NAMES": ["PayPal-Request-Id"],
        "STRICT_KEY_SYNTAX": True,
        "STORE_5XX": True,
        "RETENTION_HOURS": 24,
    }
    protected = idempotent(
        scope=answer,
        key_from="body:id",
        wait_seconds=2,
        isolation="serializable",
        using="default",
    )(answer)
    with override_settings(IDEMPOTENCY=given):
        [policy] = found(path("", protected))
    assert (policy.headers, policy.key_from, policy.retention_hours) == (
        ("PayPal-Request-Id",),
        "body:id",
        24,
    )
    assert found(path("", idempotent(retention_hours=100)(answer)))[0].retention_hours == 100
    assert "without quotes" not in policy.key_format
    assert "5xx" in policy.stored_statuses
    assert (policy.scope, policy.isolation, policy.using) == (
        "tests.request.test_policy.answer",
        "serializable",
        "default",
    )
    assert (policy.wait_seconds, policy.store_body) == (2, False)


@pytest.mark.processes
def test_the_command_asks_no_database() -> None:
    done = run(
        "describe_idempotency", "--json", DATABASE_URL="postgresql://postgres@127.0.0.1:1/nowhere"
    )
    assert done.returncode == 0, done.stderr
    assert [view["path"] for view in json.loads(done.stdout)] == [
        "/rides",
        "/rides/<int:ride_id>",
        "/rides/<int:ride_id>/texts",
    ]


def test_the_operations_are_described_with_their_points_calls_and_retention() -> None:
    described = {policy.operation: policy for policy in operation_policies()}
    ship, pay, note = (described[f"tests.{name}"] for name in ("ship", "pay", "note"))
    assert ship == OperationPolicy(
        operation="tests.ship",
        function="tests.operations.ship",
        parameters="(*, name: str, cents: int)",
        recovery_points=("started", "booked", "paid", "finished"),
        calls={"transfer": 23, "told": None},
        undo="",
        retention_hours=100,
        wait_seconds=0,
        lease_seconds=90,
        using="",
    )
    assert (pay.undo, pay.retention_hours) == ("tests.operations.unbooked", None)
    assert (note.recovery_points, note.calls, note.lease_seconds) == ((), {}, 30)
    assert json.loads(run_here("describe_idempotency", "--operations", "--json").stdout) == [
        json.loads(json.dumps(asdict(policy))) for policy in operation_policies()
    ]


def test_an_operation_is_printed_for_people() -> None:
    output = run_here("describe_idempotency", "--operations").stdout
    described = output.partition("tests.ship")[2].partition("\n\n")[0]
    assert described.splitlines() == [
        "(*, name: str, cents: int)",
        "    function:               tests.operations.ship",
        "    recovery points:        started, booked, paid, finished",
        "    calls:                  transfer (key valid for 23 hours), told (at most once)",
        "    retention hours:        100",
        "    wait seconds:           0",
        "    lease seconds:          90",
    ]
    assert "    retention hours:        forever" in output
    assert output.endswith(" operations.\n")
