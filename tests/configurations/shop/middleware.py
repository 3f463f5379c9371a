"""The middleware that projects write."""

import gzip
from collections.abc import Callable
from io import BytesIO

from django.http import HttpRequest, HttpResponseBase

Next = Callable[[HttpRequest], HttpResponseBase]


def reads_the_body(get_response: Next) -> Next:
    """Read the body, as a middleware that logs requests does."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        assert isinstance(request.body, bytes)
        return get_response(request)

    return middleware


def decodes_the_body(get_response: Next) -> Next:
    """Replace a body that is compressed."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        if request.headers.get("Content-Encoding") == "gzip":
            request._body = gzip.decompress(request.body)
            request._stream = BytesIO(request._body)
        return get_response(request)

    return middleware


def sets_headers(get_response: Next) -> Next:
    """Set a header that differs in each response."""
    count = iter(range(1_000_000))

    def middleware(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        response["X-Request-Id"] = str(next(count))
        return response

    return middleware


def sets_the_urls(get_response: Next) -> Next:
    """Choose the URLs for each request, as a project with several sites does."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        request.urlconf = "tests.configurations.shop.urls"
        return get_response(request)

    return middleware


def sets_a_lock(get_response: Next) -> Next:
    """Set an attribute that cannot be copied."""
    import threading

    def middleware(request: HttpRequest) -> HttpResponseBase:
        request.lock = threading.Lock()
        request.things = [threading.Lock()]
        return get_response(request)

    return middleware


def wraps_statements(get_response: Next) -> Next:
    """Add a comment to each statement, as tracers do."""
    from django.db import connections

    def comment(execute, sql, params, many, context):
        context["cursor"].connection.info.transaction_status  # noqa: B018 - a wrapper may use the connection
        return execute(f"{sql} /* traced */", params, many, context)

    def middleware(request: HttpRequest) -> HttpResponseBase:
        with connections["default"].execute_wrapper(comment):
            return get_response(request)

    return middleware
