"""The OpenAPI description of protected views: in the demo's document, by drf-spectacular, and by
Django Ninja."""

import json
import re
from typing import Any

import pytest
import schemathesis
from django.http import HttpRequest
from django.urls import URLPattern, path
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.settings import patched_settings
from drf_spectacular.utils import extend_schema
from drf_spectacular.validation import validate_schema
from ninja.decorators import decorate_view
from pytest_django import Settings
from rest_framework import serializers, viewsets
from rest_framework.decorators import action, api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency._http.problems import KINDS
from idempotency.contrib import ninja
from idempotency.contrib.ninja_openapi import NinjaAPI
from idempotency.contrib.spectacular import AutoSchema
from idempotency.decorators import idempotent
from idempotency.policy import policies
from rides_demo.documents import OPENAPI
from rides_demo.urls import urlpatterns

DEMO = json.loads(OPENAPI.read_text())
STATUSES = {"400", "409", "422", "503"}


class Transfer(serializers.Serializer[Any]):
    amount = serializers.IntegerField()


class Transfers(APIView):
    schema = AutoSchema()
    serializer_class = Transfer

    def get(self, request: Request) -> Response:
        return Response({})

    @idempotent
    def post(self, request: Request) -> Response:
        return Response({}, status=201)


class TransferSet(viewsets.GenericViewSet[Any]):
    schema = AutoSchema()
    serializer_class = Transfer

    @idempotent(required=False)
    def create(self, request: Request) -> Response:
        return Response({}, status=201)

    @idempotent(recovery_points=["sent"])
    @action(detail=False, methods=["post"])
    def send(self, request: Request) -> Response:
        return Response({})

    def update(self, request: Request) -> Response:
        return Response({})


def made_with_spectacular(*patterns: URLPattern, version: str = "3.1.0") -> dict[str, Any]:
    with patched_settings({"OAS_VERSION": version}):
        document: dict[str, Any] = SchemaGenerator(patterns=list(patterns)).get_schema(public=True)
    validate_schema(document)
    return document


def key_parameter(operation: dict[str, Any]) -> dict[str, Any] | None:
    given = [
        parameter for parameter in operation.get("parameters", []) if parameter["in"] == "header"
    ]
    assert len(given) < 2
    return given[0] if given else None


def is_described(operation: dict[str, Any]) -> bool:
    statuses = {str(status) for status in operation["responses"]}
    said = [bool(key_parameter(operation)), "x-idempotency" in operation, statuses >= STATUSES]
    assert len(set(said)) == 1, operation
    return said[0]


@pytest.mark.parametrize("version", ["3.0.3", "3.1.0"])
def test_37_spectacular_describes_the_methods_that_are_protected(version: str) -> None:
    document = made_with_spectacular(
        path("transfers", Transfers.as_view()),
        path("set", TransferSet.as_view({"post": "create", "put": "update"})),
        path("set/send", TransferSet.as_view({"post": "send"})),
        version=version,
    )

    described = {
        (address, method): is_described(operation)
        for address, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert described == {
        ("/transfers", "get"): False,
        ("/transfers", "post"): True,
        ("/set", "post"): True,
        ("/set", "put"): False,
        ("/set/send", "post"): True,
    }
    assert [
        key_parameter(document["paths"][address]["post"])["required"]
        for address in ("/transfers", "/set")
    ] == [
        True,
        False,
    ]


def test_37_spectacular_describes_a_function() -> None:
    @api_view(["POST", "GET"])
    @idempotent
    def transfer(request: Request) -> Response:
        return Response({})

    transfer.cls.schema = AutoSchema()
    document = made_with_spectacular(path("transfer", transfer))

    assert {
        method: is_described(operation)
        for method, operation in document["paths"]["/transfer"].items()
    } == {
        "get": False,
        "post": True,
    }


def test_37_what_spectacular_was_told_of_a_method_stays(settings: Settings) -> None:
    settings.REST_FRAMEWORK = {"DEFAULT_SCHEMA_CLASS": "idempotency.contrib.spectacular.AutoSchema"}

    class Told(APIView):
        schema = AutoSchema()

        @extend_schema(summary="Above", request=Transfer, responses={201: Transfer, 409: Transfer})
        @idempotent
        def post(self, request: Request) -> Response:
            return Response({})

        @idempotent
        @extend_schema(summary="Below", request=Transfer, responses={200: Transfer})
        def put(self, request: Request) -> Response:
            return Response({})

    operations = made_with_spectacular(path("told", Told.as_view()))["paths"]["/told"]

    assert [
        (operation["summary"], is_described(operation)) for operation in operations.values()
    ] == [
        ("Above", True),
        ("Below", True),
    ]
    assert set(operations["post"]["responses"]["409"]["content"]) == {
        "application/json",
        "application/problem+json",
    }


def test_37_the_policy_is_that_of_the_settings(settings: Settings) -> None:
    settings.IDEMPOTENCY = {
        "HEADER_NAMES": ["PayPal-Request-Id"],
        "RETENTION_HOURS": 48,
        "MISMATCH_STATUS": 409,
        "REPLAYED_HEADER": "X-Replayed",
        "KEY_MAX_LENGTH": 64,
    }
    operation = made_with_spectacular(path("transfers", Transfers.as_view()))["paths"][
        "/transfers"
    ]["post"]

    assert key_parameter(operation)["name"] == "PayPal-Request-Id"
    assert "48 hours" in key_parameter(operation)["description"]
    assert set(operation["responses"]) == {"200", "400", "409", "503"}
    assert "different request" in operation["responses"]["409"]["description"]
    assert "X-Replayed" in operation["responses"]["200"]["headers"]
    published = operation["x-idempotency"]
    assert (
        published["retention_hours"],
        published["key_max_length"],
        published["mismatch_status"],
    ) == (48, 64, 409)


def test_37_ninja_describes_the_operations_that_are_protected() -> None:
    api = NinjaAPI(urls_namespace="described")

    @api.post("/transfers", response={201: dict[str, int], 409: dict[str, str]})
    @decorate_view(ninja.idempotent)
    def transfer(request: HttpRequest, amount: int) -> tuple[int, dict[str, int]]:
        return 201, {"amount": amount}

    @api.post("/plain")
    def plain(request: HttpRequest) -> None:
        return None

    document = json.loads(json.dumps(api.get_openapi_schema(path_prefix="")))
    validate_schema(document)
    operation = document["paths"]["/transfers"]["post"]
    assert (is_described(operation), is_described(document["paths"]["/plain"]["post"])) == (
        True,
        False,
    )
    assert set(operation["responses"]["409"]["content"]) == {
        "application/json",
        "application/problem+json",
    }
    assert "Idempotent-Replayed" in operation["responses"]["201"]["headers"]
    assert [parameter["name"] for parameter in operation["parameters"]] == [
        "amount",
        "Idempotency-Key",
    ]


def test_37_another_form_of_errors_is_not_described_as_a_problem(settings: Settings) -> None:
    settings.IDEMPOTENCY = {"ERROR_RENDERER": lambda **members: None}
    operation = made_with_spectacular(path("transfers", Transfers.as_view()))["paths"][
        "/transfers"
    ]["post"]

    assert all("content" not in operation["responses"][status] for status in STATUSES)


def test_what_an_operation_says_itself_is_kept() -> None:
    api = NinjaAPI(urls_namespace="own")
    own = {
        "parameters": [
            {
                "name": "idempotency-key",
                "in": "header",
                "description": "Ours.",
                "schema": {"type": "string"},
            }
        ],
        "responses": {409: {"description": "Ours."}},
    }

    @api.post("/transfers", openapi_extra=own)
    @decorate_view(ninja.idempotent)
    def transfer(request: HttpRequest) -> None:
        return None

    operation = api.get_openapi_schema(path_prefix="")["paths"]["/transfers"]["post"]
    assert (
        key_parameter(operation)["description"],
        operation["responses"][409]["description"],
    ) == ("Ours.", "Ours.")
    assert "Retry-After" in operation["responses"][409]["headers"]


def test_the_document_of_the_demo_is_valid() -> None:
    schemathesis.openapi.from_dict(DEMO).validate()
    validate_schema(DEMO)


def test_the_document_of_the_demo_has_every_route() -> None:
    routes = {
        "/" + re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", str(route.pattern))
        for route in urlpatterns
        if isinstance(route, URLPattern)
    }
    # The routes of the page are not public, and may change with the page.
    assert set(DEMO["paths"]) == {
        route for route in routes if not route.startswith(("/page/", "/switches/"))
    }


def test_the_document_of_the_demo_says_which_requests_need_a_key() -> None:
    protected = {
        (re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", policy.path), method)
        for policy in policies("rides_demo.urls")
        for method in policy.methods
    }
    key = {"$ref": "#/components/parameters/IdempotencyKey"}
    described = {
        (address, method.upper())
        for address, methods in DEMO["paths"].items()
        for method, operation in methods.items()
        if method != "parameters" and key in operation.get("parameters", [])
    }
    methods_of_routes = {
        (address, method.upper())
        for address, methods in DEMO["paths"].items()
        for method in methods
    }
    assert described == protected & methods_of_routes
    assert {address for address, _ in described} == {address for address, _ in protected}


def test_the_document_of_the_demo_knows_every_code() -> None:
    assert set(DEMO["components"]["schemas"]["Problem"]["properties"]["code"]["enum"]) == set(KINDS)
