"""Operations of Django Ninja, behind tokens."""

from typing import Any

from django.http import HttpRequest
from django.urls import path
from ninja import NinjaAPI, Status
from ninja.decorators import decorate_view
from ninja.errors import HttpError
from ninja.security import HttpBearer

from idempotency.contrib import ninja
from rides_demo.models import User
from tests.frameworks.kinds.base import Answer, Errors, Job, Patterns, async_body_of, body_of
from tests.frameworks.kinds.django_views import django_answer
from tests.frameworks.work import Forbidden, Invalid, Missing, Reply

NINJA_ERRORS: Errors = {
    Missing: lambda: HttpError(404, "Not found"),
    Invalid: lambda: HttpError(400, "The name is missing"),
    Forbidden: lambda: HttpError(403, "Not yours"),
}


class Token(HttpBearer):
    """The same for Ninja."""

    def authenticate(self, request: HttpRequest, token: str) -> User | None:
        """Return the user of the token."""
        return User.objects.filter(api_token_hash=User.hash_token(token), is_active=True).first()


class AsyncToken(HttpBearer):
    """The same for Ninja's async operations."""

    async def authenticate(self, request: HttpRequest, token: str) -> User | None:
        """Return the user of the token."""
        return await User.objects.filter(
            api_token_hash=User.hash_token(token), is_active=True
        ).afirst()


def _ninja_answer(job: Job) -> Answer:
    def answer(request: HttpRequest, reply: Reply) -> Any:
        # A phase stores a response, and only a response can redirect; else an operation returns
        # what Ninja makes one of.
        if job.phased or reply.headers or reply.cookies:
            return django_answer(request, reply)
        return Status(reply.status, reply.data)

    return answer


RESPONSES: dict[Any, Any] = {204: None, ...: dict[str, Any] | None}


def operation(job: Job) -> Patterns:
    """Operations of Django Ninja."""
    api = NinjaAPI(auth=Token(), docs_url=None, openapi_url=None)
    body = body_of(job, _ninja_answer(job), NINJA_ERRORS)

    @api.api_operation(["POST", "PUT"], "/other/", response=RESPONSES)
    @api.api_operation(["POST", "PUT"], "/view/", response=RESPONSES)
    @decorate_view(job.protect(ninja.idempotent))
    def create_entry(request: HttpRequest) -> Any:
        return body(request)

    @api.get("/view/", response=RESPONSES)
    def list_entries(request: HttpRequest) -> Any:
        return body(request)

    return [path("", api.urls)]


def async_operation(job: Job) -> Patterns:
    """Async operations of Django Ninja."""
    api = NinjaAPI(auth=AsyncToken(), docs_url=None, openapi_url=None)
    body = async_body_of(job, _ninja_answer(job), NINJA_ERRORS)

    @api.api_operation(["POST", "PUT"], "/other/", response=RESPONSES)
    @api.api_operation(["POST", "PUT"], "/view/", response=RESPONSES)
    @decorate_view(job.protect(ninja.idempotent))
    async def create_entry(request: HttpRequest) -> Any:
        return await body(request)

    @api.get("/view/", response=RESPONSES)
    async def list_entries(request: HttpRequest) -> Any:
        return await body(request)

    return [path("", api.urls)]
