"""Django's own views: functions, classes, both of them async, and one behind an HTML form."""

from django.contrib.auth.decorators import login_required
from django.contrib.auth.mixins import LoginRequiredMixin
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.utils.decorators import method_decorator
from django.views import View

from tests.frameworks.kinds.base import (
    Errors,
    Job,
    Patterns,
    async_body_of,
    at_both,
    body_of,
    dressed,
)
from tests.frameworks.work import Forbidden, Invalid, Missing, Reply

DJANGO_ERRORS: Errors = {
    Missing: Http404,
    Invalid: BadRequest,
    Forbidden: PermissionDenied,
}


def django_answer(request: HttpRequest, reply: Reply) -> HttpResponseBase:
    """Answer as Django's views do."""
    response = (
        HttpResponse(status=reply.status)
        if reply.data is None
        else JsonResponse(reply.data, status=reply.status)
    )
    return dressed(response, reply)


def function(job: Job) -> Patterns:
    """A function view."""
    body = body_of(job, django_answer, DJANGO_ERRORS)

    @login_required
    @job.protect()
    def view(request: HttpRequest) -> HttpResponseBase:
        return body(request)

    return at_both(view)


def class_by_dispatch(job: Job) -> Patterns:
    """A class-based view, decorated as a whole."""
    body = body_of(job, django_answer, DJANGO_ERRORS)

    @method_decorator([login_required, job.protect()], name="dispatch")
    class Entries(View):
        def get(self, request: HttpRequest) -> HttpResponseBase:
            return body(request)

        post = put = get

    return at_both(Entries.as_view())


def class_by_post(job: Job) -> Patterns:
    """A class-based view, decorated from outside, method by method."""
    body = body_of(job, django_answer, DJANGO_ERRORS)

    @method_decorator(job.protect(), name="put")
    @method_decorator(job.protect(), name="post")
    class Entries(LoginRequiredMixin, View):
        def get(self, request: HttpRequest) -> HttpResponseBase:
            return body(request)

        def post(self, request: HttpRequest) -> HttpResponseBase:
            return body(request)

        def put(self, request: HttpRequest) -> HttpResponseBase:
            return body(request)

    return at_both(Entries.as_view())


def class_method(job: Job) -> Patterns:
    """A class-based view whose methods are decorated where they stand."""
    body = body_of(job, django_answer, DJANGO_ERRORS)

    class Entries(LoginRequiredMixin, View):
        def get(self, request: HttpRequest) -> HttpResponseBase:
            return body(request)

        @job.protect()
        def post(self, request: HttpRequest) -> HttpResponseBase:
            return body(request)

        @job.protect()
        def put(self, request: HttpRequest) -> HttpResponseBase:
            return body(request)

    return at_both(Entries.as_view())


def async_function(job: Job) -> Patterns:
    """An async function view."""
    body = async_body_of(job, django_answer, DJANGO_ERRORS)

    @login_required
    @job.protect()
    async def view(request: HttpRequest) -> HttpResponseBase:
        return await body(request)

    return at_both(view)


def async_method(job: Job) -> Patterns:
    """A class-based view with async methods."""
    body = async_body_of(job, django_answer, DJANGO_ERRORS)

    class Entries(View):
        async def get(self, request: HttpRequest) -> HttpResponseBase:
            return await body(request)

        @job.protect()
        async def post(self, request: HttpRequest) -> HttpResponseBase:
            return await body(request)

        @job.protect()
        async def put(self, request: HttpRequest) -> HttpResponseBase:
            return await body(request)

    return at_both(login_required(Entries.as_view()))


def async_by_post(job: Job) -> Patterns:
    """A class-based view with async methods, decorated from outside."""
    body = async_body_of(job, django_answer, DJANGO_ERRORS)

    @method_decorator(job.protect(), name="put")
    @method_decorator(job.protect(), name="post")
    class Entries(View):
        async def get(self, request: HttpRequest) -> HttpResponseBase:
            return await body(request)

        async def post(self, request: HttpRequest) -> HttpResponseBase:
            return await body(request)

        async def put(self, request: HttpRequest) -> HttpResponseBase:
            return await body(request)

    return at_both(login_required(Entries.as_view()))


def form(job: Job) -> Patterns:
    """A view of an HTML form, whose key comes in a hidden field."""
    body = body_of(job, django_answer, DJANGO_ERRORS)

    @login_required
    @job.protect(key_from="form:idempotency_key")
    def view(request: HttpRequest) -> HttpResponseBase:
        return body(request)

    return at_both(view)
