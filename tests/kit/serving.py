"""Views under test with real URLs, and clients that are signed in, each as a new user."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore
from django.http import HttpResponse, HttpResponseBase
from django.test import Client
from django.urls import path
from pytest_django import Settings

View = Callable[..., HttpResponseBase]


@pytest.fixture
def serve(settings: Settings) -> Callable[..., None]:
    """Return a function that serves views at /NAME/ for the rest of the test."""

    def put(**views: View) -> None:
        patterns = [path(f"{name}/", view, name=name) for name, view in views.items()]
        settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": patterns})

    return put


def sign_in(client: Client, user: Any) -> None:
    """Give a client the session of a user with one statement; ``force_login()`` takes six."""
    session = SessionStore()
    session.update(
        {SESSION_KEY: str(user.pk), BACKEND_SESSION_KEY: settings.AUTHENTICATION_BACKENDS[0]}
    )
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.save(must_create=True)
    client.cookies[settings.SESSION_COOKIE_NAME] = session.session_key


class Sender:
    """A client of one user that sends JSON with keys."""

    def __init__(self) -> None:
        # models cannot be imported when pytest collects its fixtures
        from tests.factories import UserFactory

        self.user = UserFactory()
        self.client = Client(raise_request_exception=False)
        sign_in(self.client, self.user)

    def send(
        self,
        url: str = "/view/",
        key: str | None = "key-1",
        body: Any = None,
        *,
        method: str = "POST",
        **extra: Any,
    ) -> Any:
        """Send one request."""
        headers = extra.pop("headers", {}) | ({"Idempotency-Key": key} if key is not None else {})
        content = (
            body
            if isinstance(body, bytes | str)
            else json.dumps({"a": 1} if body is None else body)
        )
        return self.client.generic(
            method,
            url,
            content,
            content_type=extra.pop("content_type", "application/json"),
            headers=headers,
            **extra,
        )


@pytest.fixture
def sender(transactional_db: None) -> Sender:
    """Return a signed-in client. Transactions of the test are real; the database is emptied after
    the test."""
    return Sender()


def problem(response: HttpResponse) -> dict[str, Any]:
    """Return the content of a problem+json response."""
    assert response["Content-Type"] == "application/problem+json", response.content
    content: dict[str, Any] = json.loads(response.content)
    return content


def another_client(sender: Sender) -> Sender:
    """Return a sender of the same user and session with a separate client, for another thread."""
    other = copy.copy(sender)
    other.client = Client(raise_request_exception=False)
    other.client.cookies.update(sender.client.cookies)
    return other
