"""Views of Django REST framework, behind tokens."""

from typing import Any

from django.http import HttpResponseBase
from django.urls import include, path
from django.utils.decorators import method_decorator
from rest_framework import exceptions, mixins, viewsets
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.decorators import action, api_view, authentication_classes, permission_classes
from rest_framework.permissions import IsAuthenticated
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView

from rides_demo.models import User
from tests.frameworks.kinds.base import Errors, Job, Patterns, at_both, body_of, dressed
from tests.frameworks.work import Forbidden, Invalid, Missing, Reply

REST_ERRORS: Errors = {
    Missing: exceptions.NotFound,
    Invalid: lambda: exceptions.ValidationError({"name": ["This field is required."]}),
    Forbidden: exceptions.PermissionDenied,
}


class Bearer(BaseAuthentication):
    """``Authorization: Bearer <token>``, as most APIs have it."""

    def authenticate(self, request: Any) -> tuple[User, str] | None:
        """Return the user of the token."""
        scheme, _, token = get_authorization_header(request).decode().partition(" ")
        if scheme != "Bearer":
            return None
        try:
            return User.objects.with_token(token), token
        except User.DoesNotExist:
            raise exceptions.AuthenticationFailed from None

    def authenticate_header(self, request: Any) -> str:
        """Ask for a token: 401, not 403."""
        return "Bearer"


def rest_answer(request: Any, reply: Reply) -> HttpResponseBase:
    """Answer as the views of DRF do: what is rendered later, in a format that the client has asked
    for."""
    return dressed(Response(reply.data, status=reply.status), reply)


class Protected:
    """The policies of all views of DRF here."""

    authentication_classes = [Bearer]
    permission_classes = [IsAuthenticated]


def api_view_class(job: Job) -> Patterns:
    """An APIView."""
    body = body_of(job, rest_answer, REST_ERRORS)

    class Entries(Protected, APIView):
        def get(self, request: Any) -> HttpResponseBase:
            return body(request)

        @job.protect()
        def post(self, request: Any) -> HttpResponseBase:
            return body(request)

        @job.protect()
        def put(self, request: Any) -> HttpResponseBase:
            return body(request)

    return at_both(Entries.as_view())


def api_view_function(job: Job) -> Patterns:
    """A function with @api_view."""
    body = body_of(job, rest_answer, REST_ERRORS)

    @api_view(["GET", "POST", "PUT"])
    @authentication_classes([Bearer])
    @permission_classes([IsAuthenticated])
    @job.protect()
    def view(request: Any) -> HttpResponseBase:
        return body(request)

    return at_both(view)


def view_set(job: Job) -> Patterns:
    """A ViewSet whose actions are decorated where they stand."""
    body = body_of(job, rest_answer, REST_ERRORS)

    class Entries(Protected, viewsets.ViewSet):
        def list(self, request: Any) -> HttpResponseBase:
            return body(request)

        @job.protect()
        def create(self, request: Any) -> HttpResponseBase:
            return body(request)

        @job.protect()
        def replace(self, request: Any) -> HttpResponseBase:
            return body(request)

    return at_both(Entries.as_view({"get": "list", "post": "create", "put": "replace"}))


def extra_action(job: Job) -> Patterns:
    """Extra actions of a ViewSet, behind a router."""
    body = body_of(job, rest_answer, REST_ERRORS)

    class Entries(Protected, viewsets.ViewSet):
        @action(detail=False, methods=["get"])
        def view(self, request: Any) -> HttpResponseBase:
            return body(request)

        @view.mapping.post
        @job.protect()
        def create_view(self, request: Any) -> HttpResponseBase:
            return body(request)

        @view.mapping.put
        @job.protect()
        def replace_view(self, request: Any) -> HttpResponseBase:
            return body(request)

        @job.protect()
        @action(detail=False, methods=["post"])
        def other(self, request: Any) -> HttpResponseBase:
            return body(request)

    router = SimpleRouter()
    router.register("", Entries, basename="entries")
    return [path("", include(router.urls))]


def generic_create(job: Job) -> Patterns:
    """A generic view whose ``create`` is inherited and decorated from outside."""
    body = body_of(job, rest_answer, REST_ERRORS)

    class Inherited(mixins.CreateModelMixin):
        def create(self, request: Any) -> HttpResponseBase:
            return body(request)

        def update(self, request: Any) -> HttpResponseBase:
            return body(request)

    @method_decorator(job.protect(), name="update")
    @method_decorator(job.protect(), name="create")
    class Entries(Protected, Inherited, viewsets.GenericViewSet):
        def list(self, request: Any) -> HttpResponseBase:
            return body(request)

    return at_both(Entries.as_view({"get": "list", "post": "create", "put": "update"}))
