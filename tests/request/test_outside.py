"""Code that runs before the decorator: a permission, and ``dispatch()`` of a class with its
check."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from django.contrib.auth.decorators import login_required
from django.contrib.auth.mixins import LoginRequiredMixin
from django.core.checks import run_checks
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from django.views.generic import CreateView
from pytest_django import Settings
from rest_framework.views import APIView

from idempotency import signals
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender
from tests.kit.views import Counted, both_kinds
from tests.models import Entry

HERE = "tests.request.test_outside"
LOGIN = "django.contrib.auth.decorators.user_passes_test"


def answer(request: HttpRequest) -> HttpResponseBase:
    """Return 201 to each request."""
    return HttpResponse(status=201)


class Basket(View):
    """A view that refuses requests depending on the state, like a checkout with an empty basket."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if Entry.objects.exists():
            return redirect("/basket/")
        return super().dispatch(request, *args, **kwargs)

    def post(self, request: HttpRequest) -> HttpResponseBase:
        Entry.objects.create(name="ordered")
        return HttpResponse(status=201)


@method_decorator(idempotent, name="post")
class ByName(Basket):
    """A handler that is decorated by its name."""


class OnMethod(Basket):
    """A handler that is decorated at its definition."""

    @idempotent
    def post(self, request: HttpRequest) -> HttpResponseBase:
        return super().post(request)


@method_decorator([never_cache, login_required, idempotent], name="post")
class InAList(Basket):
    """A handler with several decorators."""


@method_decorator(idempotent, name="dispatch")
class Whole(Basket):
    """A class that is decorated as a whole, including the code that refuses."""


class AboveWhole(Whole):
    """A class whose parent is decorated as a whole."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        return super().dispatch(request, *args, **kwargs)


class InRest(APIView):
    """The same view in Django REST framework."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        return super().dispatch(request, *args, **kwargs)

    @idempotent
    def post(self, request: Any) -> HttpResponseBase:
        return HttpResponse()


@method_decorator(login_required, name="dispatch")
class OfDjango(LoginRequiredMixin, CreateView):
    """A class in which only Django's code runs before the handler."""

    @idempotent
    def post(self, request: HttpRequest) -> HttpResponseBase:
        return HttpResponse()


class SetUp(OfDjango):
    """A class with its own ``setup()``."""

    def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        super().setup(request, *args, **kwargs)


def served(settings: Settings, *views: Any) -> None:
    patterns = [path(f"{number}/", view) for number, view in enumerate(views)]
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": patterns})


def warnings() -> list[str]:
    return [message.msg for message in run_checks(databases=[]) if message.id == "idempotency.W012"]


@pytest.mark.parametrize(
    ("view", "named"),
    [
        (ByName, "Basket"),
        (OnMethod, "Basket"),
        (InAList, "Basket"),
        (AboveWhole, "AboveWhole"),
        (InRest, "InRest"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_dispatch_of_the_project_above_the_decorator_is_a_warning(
    view: Any, named: str, settings: Settings
) -> None:
    served(settings, view.as_view())
    [message] = warnings()
    assert f"{HERE}.{named}.dispatch" in message


@pytest.mark.parametrize(
    "view", [Whole.as_view(), OfDjango.as_view(), SetUp.as_view(), idempotent(Basket.as_view())]
)
def test_a_dispatch_inside_the_decorator_and_one_of_django_are_none(
    view: Any, settings: Settings
) -> None:
    served(settings, view)
    assert warnings() == []


def test_what_the_warning_is_about_sends_the_retry_elsewhere(
    settings: Settings, sender: Sender
) -> None:
    served(settings, ByName.as_view(), Whole.as_view())
    assert [sender.send("/0/").status_code for _ in range(2)] == [201, 302]
    Entry.objects.all().delete()
    assert [sender.send("/1/", key="key-2").status_code for _ in range(2)] == [201, 201]


@both_kinds
def test_a_permission_outside_the_decorator_is_asked_before_each_replay(
    kind: Callable[..., Any], settings: Settings, sender: Sender
) -> None:
    granted, replayed = [True, True, False, True], []

    def permitted(view: Any) -> Any:
        @wraps(view)
        def checked(request: HttpRequest) -> HttpResponseBase:
            return view(request) if granted.pop(0) else HttpResponse(status=403)

        return checked

    def note(**kwargs: Any) -> None:
        replayed.append(kwargs["key"].pk)

    served(settings, permitted(kind(work := Counted())))
    signals.key_replayed.connect(note)
    try:
        assert [sender.send("/0/").status_code for _ in range(2)] == [201, 201]
        stored = IdempotencyKey.objects.values().get()
        refused = sender.send("/0/")
        assert (refused.status_code, "Idempotent-Replayed" in refused) == (403, False)
        assert (IdempotencyKey.objects.values().get(), len(replayed)) == (stored, 1)
        assert sender.send("/0/")["Idempotent-Replayed"] == "true"
    finally:
        signals.key_replayed.disconnect(note)
    assert (work.runs, len(replayed), Entry.objects.count()) == (1, 2, 1)
