"""One kind of view behind real URLs, and the clients that speak to it as its users' do."""

import json
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponseBase
from django.test import Client
from django.utils.deprecation import MiddlewareMixin
from pytest_django import Settings

from tests.factories import UserFactory
from tests.frameworks.kinds import Job, Kind
from tests.frameworks.work import Work


class Caller:
    """A client of one user."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.client = Client(raise_request_exception=False)
        self.headers: dict[str, str] = {}

    def sign_in(self) -> "Caller":
        """Let each request carry what this kind of view authenticates by, for a new user."""
        token = uuid4().hex
        self.user = UserFactory(token=token)
        if self.kind.by_token:
            self.headers = {"Authorization": f"Bearer {token}"}
        else:
            self.client.force_login(self.user)
        return self

    def again(self) -> "Caller":
        """Return another client of the same user and session, for another thread."""
        other = Caller(self.kind)
        other.headers = self.headers
        other.client.cookies.update(self.client.cookies)
        return other

    def send(
        self,
        key: str | None = "key-1",
        body: dict[str, Any] | None = None,
        *,
        method: str = "POST",
        url: str = "/view/",
    ) -> Any:
        """Send one request, the key where this kind of view looks for it."""
        fields = {"a": 1} if body is None else body
        headers = dict(self.headers)
        if self.kind.by_form:
            content, content_type = (
                urlencode(fields | ({"idempotency_key": key} if key is not None else {})),
                "application/x-www-form-urlencoded",
            )
        else:
            content, content_type = json.dumps(fields), "application/json"
            if key is not None:
                headers["Idempotency-Key"] = key
        return self.client.generic(method, url, content, content_type=content_type, headers=headers)


def by_host(get_response: Any) -> Any:
    """Choose the URLconf of the request."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        request.urlconf = globals()["urls_of_the_host"]
        response: HttpResponseBase = get_response(request)
        return response

    return middleware


class ByHost(MiddlewareMixin):
    """Do so, and take each view out of ATOMIC_REQUESTS, as async ones must be."""

    def process_request(self, request: HttpRequest) -> None:
        """Choose the URLconf of the request."""
        request.urlconf = globals()["urls_of_the_host"]

    def process_view(self, request: HttpRequest, view_func: Any, *args: Any) -> None:
        """Mark the view."""
        transaction.non_atomic_requests(view_func)


class Service:
    """A project with one kind of view."""

    def __init__(
        self, kind: Kind, phased: bool, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.kind, self.phased = kind, phased
        self._settings, self._monkeypatch = settings, monkeypatch
        self.caller = Caller(kind).sign_in()
        self.send = self.caller.send

    def serve(
        self, work: Work | None = None, *, first: Any = None, call: Any = None, **options: Any
    ) -> Work:
        """Put a view that does the work under /view/ and /other/."""
        work = work or Work()
        parts = {
            name: part for name, part in (("first", first), ("call", call)) if part is not None
        }
        patterns = self.kind.patterns(Job(work, options, self.phased, **parts))
        self._settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": patterns})
        return work

    def behind_a_middleware_that_chooses_the_urlconf(self, middleware: str = "by_host") -> None:
        """Move the views to a URLconf that only ``request.urlconf`` names, as a middleware for
        several hosts sets it."""
        globals()["urls_of_the_host"] = self._settings.ROOT_URLCONF
        self._settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": []})
        self._settings.MIDDLEWARE = [*self._settings.MIDDLEWARE, f"{__name__}.{middleware}"]

    def use_atomic_requests(self) -> None:
        """Run each request in a transaction, as ATOMIC_REQUESTS asks Django to."""
        self._monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
