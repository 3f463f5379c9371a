"""HTML forms: ``{% idempotency_key %}``, and what a browser that sends a form twice gets to see."""

import re
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from django import forms
from django.contrib.auth import login
from django.contrib.sessions.backends.db import SessionStore
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template import Context, RequestContext, Template, engines
from django.test import Client, RequestFactory
from django.urls import path
from pytest_django import Settings

from idempotency import scopes
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from tests.factories import UserFactory
from tests.kit.duplicates import waiting_requests
from tests.kit.threads import Gate, background
from tests.kit.waiting import eventually
from tests.models import Entry

PAGE = (
    "{% load idempotency %}<form method=post>{% csrf_token %}{% idempotency_key %}{{ form }}</form>"
)


class EntryForm(forms.Form):
    """What the page asks for."""

    name = forms.CharField(max_length=10)


def page(request: HttpRequest, form: forms.Form, status: int = 200) -> HttpResponse:
    """Show the form."""
    return HttpResponse(
        Template(PAGE).render(RequestContext(request, {"form": form})), status=status
    )


@idempotent(key_from="form:idempotency_key")
def create_entry(request: HttpRequest) -> HttpResponse:
    """Take an entry, as the views of forms do: show the page again when something is wrong."""
    form = EntryForm(request.POST or None)
    if not form.is_valid():
        return page(request, form)
    Entry.objects.create(name=form.cleaned_data["name"])
    return redirect("/thanks/")


def refuse(request: HttpRequest) -> HttpResponse | None:
    """Show the page again before the key is spent."""
    form = EntryForm(request.POST)
    return None if form.is_valid() else page(request, form, 422)


class Browser:
    """A browser with one visitor, who is checked for forgery like any other."""

    def __init__(self, url: str) -> None:
        self.url, self.client = url, Client(enforce_csrf_checks=True)
        self.fields: dict[str, str] = {}

    def open(self, response: Any = None) -> None:
        """Show the page, or the answer to a form, and remember its hidden fields."""
        html = (response or self.client.get(self.url)).content.decode()
        self.fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]+)">', html))

    def submit(self, name: str) -> Any:
        """Send the form that is shown."""
        return self.client.post(self.url, self.fields | {"name": name})


@pytest.fixture
def browser(settings: Settings, transactional_db: None) -> Browser:
    """Return the browser of a visitor who is not signed in."""
    validated = idempotent(key_from="form:idempotency_key", validate=refuse)(
        create_entry.__wrapped__
    )
    views = {"entries": create_entry, "validated": validated}
    settings.ROOT_URLCONF = type(
        "Urls", (), {"urlpatterns": [path(f"{name}/", view) for name, view in views.items()]}
    )
    return Browser("/entries/")


def test_tag_renders_a_new_key_each_time() -> None:
    html = Template(
        "{% load idempotency %}{% idempotency_key %}{% idempotency_key 'other' %}"
    ).render(Context())
    (name, first), (other, second) = re.findall(
        r'<input type="hidden" name="(\w+)" value="([^"]+)">', html
    )
    assert (name, other) == ("idempotency_key", "other")
    assert [UUID(first).version, UUID(second).version] == [7, 7]
    assert first != second


def test_name_of_the_field_is_escaped() -> None:
    html = Template("{% load idempotency %}{% idempotency_key name %}").render(
        Context({"name": '"><script>'})
    )
    assert "<script>" not in html


def test_a_form_is_given_a_new_key_each_time_and_a_stranger_a_session(db: None) -> None:
    template = engines["django"].from_string(
        '{% load idempotency %}{% idempotency_key %}{% idempotency_key "second" %}'
    )
    request: HttpRequest = RequestFactory().get("/")
    request.session = SessionStore()
    first = template.render({}, request)
    kept = request.session.session_key
    assert kept
    assert 'type="hidden" name="idempotency_key" value="' in first
    assert 'name="second"' in first
    assert template.render({}, request) != first
    assert request.session.session_key == kept


def test_form_that_is_sent_twice_takes_effect_once_and_redirects_twice(browser: Browser) -> None:
    browser.open()
    answers = [browser.submit("one") for _ in range(2)]
    assert [(answer.status_code, answer["Location"]) for answer in answers] == [
        (302, "/thanks/")
    ] * 2
    assert [answer.get("Idempotent-Replayed") for answer in answers] == [None, "true"]
    assert Entry.objects.get().name == "one"


def test_form_that_is_opened_again_is_another_one(browser: Browser) -> None:
    for _ in range(2):
        browser.open()
        assert browser.submit("one").status_code == 302
    assert Entry.objects.count() == 2


@pytest.mark.parametrize(("url", "status"), [("/entries/", 200), ("/validated/", 422)])
def test_corrected_form_is_sent_under_a_key_of_its_own(
    browser: Browser, url: str, status: int
) -> None:
    browser.url = url
    browser.open()
    first = browser.fields["idempotency_key"]
    refused = browser.submit("much too long a name")
    assert (refused.status_code, b"at most 10 characters" in refused.content) == (status, True)
    browser.open(refused)
    assert browser.fields["idempotency_key"] != first
    assert [browser.submit("short")["Location"] for _ in range(2)] == ["/thanks/"] * 2
    assert Entry.objects.get().name == "short"


def test_what_validate_refuses_spends_no_key(browser: Browser) -> None:
    browser.url = "/validated/"
    browser.open()
    assert browser.submit("much too long a name").status_code == 422
    assert not IdempotencyKey.objects.exists()


def test_other_visitors_have_other_keys(browser: Browser) -> None:
    other = Browser("/entries/")
    browser.open()
    other.open()
    assert browser.submit("one").status_code == 302
    other.fields["idempotency_key"] = browser.fields["idempotency_key"]
    answer = other.submit("one")
    assert (answer.status_code, "Idempotent-Replayed" in answer) == (302, False)
    assert Entry.objects.count() == 2


def test_visitor_whose_session_is_gone_gets_another(browser: Browser) -> None:
    browser.open()
    browser.client.session.flush()
    browser.open()
    assert browser.submit("one").status_code == 302


def test_signed_in_visitor_needs_no_session_of_this_app(browser: Browser) -> None:
    browser.client.force_login(user := UserFactory())
    browser.open()
    assert browser.submit("one").status_code == 302
    assert IdempotencyKey.objects.get().scope == f"user:{user.pk}"


@pytest.mark.postgres
def test_second_click_waits_for_the_first_and_is_redirected_too(
    browser: Browser, settings: Settings
) -> None:
    gate = Gate()

    @idempotent(key_from="form:idempotency_key", wait_seconds=20)
    def slow(request: HttpRequest) -> HttpResponse:
        if request.method == "POST":
            gate.wait_here()
        return create_entry.__wrapped__(request)

    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("entries/", slow)]})
    browser.open()
    with background(lambda: browser.submit("one")) as first:
        gate.wait_until_reached()
        with background(lambda: browser.submit("one")) as second:
            eventually(lambda: waiting_requests() == 1)
            gate.open()
    assert [click.result()["Location"] for click in (first, second)] == ["/thanks/"] * 2
    assert Entry.objects.count() == 1


def signing_in(**options: Any) -> Callable[..., HttpResponse]:
    """Return a view that signs a visitor in: who asks is another one after it than before."""

    @idempotent(key_from="form:idempotency_key", **options)
    def sign_in(request: HttpRequest) -> HttpResponse:
        if request.method == "GET":
            return page(request, EntryForm())
        Entry.objects.create(name="signed in")
        login(request, UserFactory._meta.model.objects.get(username=request.POST["name"]))
        return redirect("/thanks/")

    return sign_in


@pytest.mark.parametrize(
    ("options", "runs"), [({}, 2), ({"scope": scopes.session}, 1)], ids=["default", "scope"]
)
def test_47_view_that_signs_in_needs_a_scope_of_its_own(
    browser: Browser, settings: Settings, options: dict[str, Any], runs: int
) -> None:
    user = UserFactory()
    settings.ROOT_URLCONF = type(
        "Urls", (), {"urlpatterns": [path("entries/", signing_in(**options))]}
    )
    browser.client = Client()
    browser.open()
    assert [browser.submit(user.username).status_code for _ in range(2)] == [302, 302]
    assert Entry.objects.count() == runs
