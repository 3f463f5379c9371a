"""What is particular to Django REST framework."""

import json
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import urlencode

import pytest
import rest_framework
from django.apps import apps
from django.contrib.auth.models import AnonymousUser
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart
from django.test.utils import modify_settings
from django.urls import path
from django.utils.decorators import method_decorator
from pytest_django import Settings
from rest_framework import exceptions, generics, renderers, serializers, status, viewsets
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import action, api_view, renderer_classes
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.test import APIClient, APIRequestFactory
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView, exception_handler

from idempotency.completer import CompletePass, complete_once
from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from idempotency.policy import policies, unprotected
from tests.factories import UserFactory
from tests.kit.ageing import abandon
from tests.kit.threads import elsewhere
from tests.models import Account, Entry

pytestmark = pytest.mark.django_db(transaction=True)

Serve = Callable[[Any], None]


class EntrySerializer(serializers.ModelSerializer):
    """An entry as clients see it."""

    class Meta:
        model = Entry
        fields = ["id", "name"]


@method_decorator(idempotent, name="create")
class Entries(generics.CreateAPIView):
    """A generic view as its users write it."""

    queryset = Entry.objects.all()
    serializer_class = EntrySerializer
    permission_classes = [IsAuthenticated]


@pytest.fixture
def serve(settings: Settings) -> Serve:
    """Return a function that puts a view under /view/."""

    def put(view: Any) -> None:
        settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("view/", view)]})

    return put


@pytest.fixture
def client() -> APIClient:
    """Return a client that is signed in without a token, as tests of DRF's users are."""
    client = APIClient(raise_request_exception=False)
    client.force_authenticate(UserFactory())
    return client


def post(client: Any, data: Any, **extra: Any) -> Any:
    """Send data under the one key of these tests."""
    return client.post(
        "/view/", data, headers={"Idempotency-Key": "key-1", **extra.pop("headers", {})}, **extra
    )


class Anybody(BaseAuthentication):
    """An authenticator of a project, which returns the credentials of its class."""

    returned: Any

    def authenticate(self, request: Any) -> Any:
        """Return the credentials."""
        return self.returned


@pytest.mark.parametrize(
    "returned",
    [(SimpleNamespace(name="Acme"), None), (None, "account-1"), (AnonymousUser(), "account-1")],
    ids=["account", "auth", "auth and nobody"],
)
def test_a_session_cookie_beside_another_account_is_not_the_sender(
    serve: Serve, returned: Any
) -> None:
    class Pay(APIView):
        authentication_classes = [type("Account", (Anybody,), {"returned": returned})]

        @idempotent
        def post(self, request: Any) -> Response:
            return Response(status=201)

    serve(Pay.as_view())
    client = Client()
    client.force_login(UserFactory())
    assert post(client, {}).json()["code"] == "scope_missing"
    assert not IdempotencyKey.objects.exists()


def test_generic_view_creates_once(serve: Serve, client: APIClient) -> None:
    serve(Entries.as_view())
    first, second = (post(client, {"name": "one"}, format="json") for _ in range(2))
    assert (first.status_code, first.json()) == (201, {"id": Entry.objects.get().pk, "name": "one"})
    assert (second.content, second["Content-Type"]) == (first.content, "application/json")
    assert second["Idempotent-Replayed"] == "true"


def test_errors_of_a_serializer_are_stored(serve: Serve, client: APIClient) -> None:
    serve(Entries.as_view())
    first, second = (post(client, {"name": ""}, format="json") for _ in range(2))
    assert (first.status_code, first.json()) == (400, {"name": ["This field may not be blank."]})
    assert (second.content, second["Idempotent-Replayed"]) == (first.content, "true")


@pytest.mark.parametrize("data_format", ["json", "multipart"])
def test_data_of_each_parser_reach_the_view(
    serve: Serve, client: APIClient, data_format: str
) -> None:
    serve(Entries.as_view())
    assert post(client, {"name": "one"}, format=data_format).json()["name"] == "one"


def test_upload_reaches_the_view_and_its_retry_is_the_same_request(
    serve: Serve, client: APIClient
) -> None:
    @api_view(["POST"])
    @idempotent
    def upload(request: Any) -> Response:
        return Response(
            {"read": request.data["file"].read().decode(), "name": request.data["name"]}
        )

    serve(upload)
    first, second = (
        post(
            client,
            {"name": "n", "file": SimpleUploadedFile("a.txt", b"content")},
            format="multipart",
        )
        for _ in range(2)
    )
    assert first.json() == {"read": "content", "name": "n"}
    assert (second.content, second["Idempotent-Replayed"]) == (first.content, "true")


@pytest.mark.postgres
@pytest.mark.parametrize("data_format", ["json", "multipart"])
def test_data_are_as_they_came_when_a_serialization_failure_makes_the_view_run_again(
    serve: Serve, client: APIClient, data_format: str
) -> None:
    Account.objects.create(name="one")
    seen: list[Any] = []

    @api_view(["POST"])
    @idempotent(isolation="serializable")
    def view(request: Any) -> Response:
        if data_format == "json":
            seen.append(request.data.pop("name"))
        else:
            seen.append(request.data["file"].read())
        balance = Account.objects.get().balance
        if len(seen) == 1:
            elsewhere(lambda: Account.objects.update(balance=100))
        Account.objects.update(balance=balance + 1)
        return Response({"balance": balance + 1})

    serve(view)
    data = (
        {"name": "n"}
        if data_format == "json"
        else {"file": SimpleUploadedFile("a.txt", b"content")}
    )
    assert post(client, data, format=data_format).json() == {"balance": 101}
    assert seen == [seen[0]] * 2


class NeedsName(BasePermission):
    """A permission that reads the body before the view does."""

    def has_permission(self, request: Any, view: Any) -> bool:
        """Refuse what has no name."""
        return "name" in request.data


class NeedsNameInBody(NeedsName):
    """A permission that reads the body as the guide says for old versions of the framework."""

    def has_permission(self, request: Any, view: Any) -> bool:
        """Read the bytes first."""
        return bool(request.body) and super().has_permission(request, view)


@pytest.mark.parametrize("permission", [NeedsName, NeedsNameInBody])
@pytest.mark.parametrize(
    "content_type", ["application/json", "application/x-www-form-urlencoded", MULTIPART_CONTENT]
)
def test_body_may_be_read_by_a_permission(
    serve: Serve, client: APIClient, content_type: str, permission: type[BasePermission]
) -> None:
    def send(name: str) -> Any:
        fields = {"name": name}
        bodies = {
            "application/json": json.dumps,
            MULTIPART_CONTENT: partial(encode_multipart, BOUNDARY),
        }
        return post(client, bodies.get(content_type, urlencode)(fields), content_type=content_type)

    serve(Entries.as_view(permission_classes=[permission]))
    # It reads a stream, and keeps no bytes.
    if (
        rest_framework.VERSION < "3.18"
        and permission is NeedsName
        and content_type != MULTIPART_CONTENT
    ):
        assert send("one").status_code == 500
        return
    first, second = (send("one") for _ in range(2))
    assert (first.status_code, second.content) == (201, first.content)
    assert send("two").json()["code"] == "key_reused"


def test_permission_is_asked_before_a_replay(serve: Serve, client: APIClient) -> None:
    granted = [True, False]

    class Once(BasePermission):
        def has_permission(self, request: Any, view: Any) -> bool:
            return granted.pop(0)

    serve(Entries.as_view(permission_classes=[Once]))
    assert [post(client, {"name": "one"}).status_code for _ in range(2)] == [201, 403]


def test_object_permission_in_initial_is_asked_before_a_replay(
    serve: Serve, client: APIClient
) -> None:
    class OfOpenAccount(BasePermission):
        def has_object_permission(self, request: Any, view: Any, account: Any) -> bool:
            return account.balance > 0

    class Pay(APIView):
        permission_classes = [OfOpenAccount]

        def initial(self, request: Any, *args: Any, **kwargs: Any) -> None:
            super().initial(request, *args, **kwargs)
            self.check_object_permissions(request, Account.objects.get())

        @idempotent
        def post(self, request: Any) -> Response:
            return Response({"secret": Entry.objects.create(name="one").pk}, status=201)

    account = Account.objects.create(name="purse", balance=1)
    serve(Pay.as_view())
    assert [post(client, {}).status_code for _ in range(2)] == [201, 201]
    Account.objects.update(balance=0)
    refused = post(client, {})
    assert (refused.status_code, b"secret" in refused.content) == (403, False)
    account.save()
    assert post(client, {})["Idempotent-Replayed"] == "true"
    assert Entry.objects.count() == 1


def test_throttled_request_leaves_no_record(serve: Serve, client: APIClient) -> None:
    class Never(BaseThrottle):
        def allow_request(self, request: Any, view: Any) -> bool:
            return False

    serve(Entries.as_view(throttle_classes=[Never]))
    assert post(client, {"name": "one"}).status_code == 429
    assert not IdempotencyKey.objects.exists()


def test_answer_is_rendered_in_the_format_that_was_asked_for(
    serve: Serve, client: APIClient
) -> None:
    class Shouting(renderers.JSONRenderer):
        media_type, format = "application/vnd.shout+json", "shout"

        def render(self, data: Any, *args: Any, **kwargs: Any) -> bytes:
            return super().render(data, *args, **kwargs).upper()

    serve(Entries.as_view(renderer_classes=[renderers.JSONRenderer, Shouting]))
    first, second = (
        post(client, {"name": "one"}, headers={"Accept": "application/vnd.shout+json"})
        for _ in range(2)
    )
    assert (first["Content-Type"], b'"NAME":"ONE"' in first.content) == (
        "application/vnd.shout+json",
        True,
    )
    assert (second.content, second["Content-Type"], second["Vary"]) == (
        first.content,
        first["Content-Type"],
        first["Vary"],
    )


def test_answer_that_cannot_be_rendered_leaves_nothing(serve: Serve, client: APIClient) -> None:
    class Broken(renderers.JSONRenderer):
        def render(self, *args: Any, **kwargs: Any) -> bytes:
            raise RuntimeError("no ink")

    serve(Entries.as_view(renderer_classes=[Broken]))
    assert post(client, {"name": "one"}).status_code == 500
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.exists()


def test_exception_handler_of_the_project_makes_the_answer(serve: Serve, client: APIClient) -> None:
    class OutOfStock(Exception):
        pass

    def handler(error: Exception, context: dict[str, Any]) -> Response | None:
        if isinstance(error, OutOfStock):
            return Response(
                {"error": "out of stock", "view": type(context["view"]).__name__},
                status=status.HTTP_409_CONFLICT,
            )
        return exception_handler(error, context)

    runs = []

    class Orders(APIView):
        def get_exception_handler(self) -> Any:
            return handler

        @idempotent
        def post(self, request: Any) -> Response:
            runs.append(Entry.objects.create(name="made"))
            raise OutOfStock

    serve(Orders.as_view())
    first, second = (post(client, {"a": 1}) for _ in range(2))
    assert (first.status_code, first.json()) == (409, {"error": "out of stock", "view": "Orders"})
    assert (second.content, second["Idempotent-Replayed"]) == (first.content, "true")
    assert (len(runs), Entry.objects.exists()) == (1, False)


def test_exception_handler_that_answers_all_is_asked_once(serve: Serve, client: APIClient) -> None:
    asked: list[str] = []

    def handler(error: Exception, context: dict[str, Any]) -> Response:
        asked.append(str(error))
        return Response({"error": "ours"}, status=500)

    class Orders(APIView):
        def get_exception_handler(self) -> Any:
            return handler

        @idempotent
        def post(self, request: Any) -> Response:
            Entry.objects.create(name="made")
            raise RuntimeError("out of luck")

    serve(Orders.as_view())
    response = post(client, {"a": 1})
    assert (response.status_code, response.json(), asked) == (
        500,
        {"error": "ours"},
        ["out of luck"],
    )
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (exceptions.NotAuthenticated, 401),
        (exceptions.PermissionDenied, 403),
        (exceptions.Throttled, 429),
    ],
)
def test_raised_answers_with_another_cure_are_not_stored(
    serve: Serve, client: APIClient, error: type[Exception], code: int
) -> None:
    @api_view(["POST"])
    @idempotent
    def view(request: Any) -> Response:
        Entry.objects.create(name="made")
        raise error

    serve(view)
    assert post(client, {"a": 1}).status_code in (code, 403)
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.exists()


def test_validate_scope_and_key_from_see_the_request_of_the_framework(
    serve: Serve, client: APIClient
) -> None:
    @api_view(["POST"])
    @idempotent(
        validate=lambda request: (
            None if request.data["name"] else Response({"name": "missing"}, status=422)
        ),
        scope=lambda request: f"tenant:{request.data['tenant']}",
        key_from=lambda request: request.data["id"],
    )
    def view(request: Any) -> Response:
        return Response(
            EntrySerializer(Entry.objects.create(name=request.data["name"])).data, status=201
        )

    serve(view)
    body = {"id": "one", "tenant": 7}
    refused = client.post("/view/", body | {"name": ""}, format="json")
    assert (refused.status_code, refused.json()) == (422, {"name": "missing"})
    first, second = (client.post("/view/", body | {"name": "n"}, format="json") for _ in range(2))
    assert (first.status_code, second.content) == (201, first.content)
    assert IdempotencyKey.objects.values_list("scope", "idempotency_key").get() == (
        "scope=tenant:7",
        "one",
    )


def test_error_renderer_of_the_framework_s_shape(
    serve: Serve, client: APIClient, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"ERROR_RENDERER": "idempotency.contrib.rest_framework.render_error"}
    serve(Entries.as_view())
    response = client.post("/view/", {"name": "one"})
    assert (response.status_code, response["Content-Type"]) == (400, "application/json")
    assert set(response.json()) == {"detail", "code"}
    assert (response.json()["code"], response["Cache-Control"]) == ("key_missing", "no-store")


def give_a_token(request: HttpRequest, key: IdempotencyKey) -> None:
    """Give the completer's request what the authentication would have."""
    request._force_auth_token = "of the completer"


def test_completer_may_be_given_what_the_authentication_returns(
    serve: Serve, client: APIClient, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": give_a_token}
    seen: list[Any] = []

    class Orders(APIView):
        permission_classes = [IsAuthenticated]

        @idempotent(recovery_points=["made"])
        def post(self, request: Any) -> Response:
            key = request.idempotency_key
            for recovery_point in key.phases():
                with atomic_phase(key) as phase:
                    if recovery_point == "started":
                        phase.set_recovery_point("made")
                    else:
                        seen.append((request.user.pk, request.auth))
                        assert len(seen) > 1, "out of luck"
                        phase.set_response(Response({"name": request.data["name"]}, status=201))
            return key.response()

    serve(Orders.as_view())
    assert post(client, {"name": "one"}, format="json").status_code == 500
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert seen == [(seen[0][0], None), (seen[0][0], "of the completer")]
    assert post(client, {"name": "one"}, format="json").json() == {"name": "one"}


def test_nothing_from_the_network_signs_in(serve: Serve) -> None:
    user = UserFactory()
    serve(Entries.as_view())
    names = [
        "_force_auth_user",
        "force_auth_user",
        "Force-Auth-User",
        "Idempotency-Completion",
        "idempotency_completion",
    ]
    stranger = Client(raise_request_exception=False)
    response = stranger.post(
        f"/view/?{'&'.join(f'{name}={user.pk}' for name in names)}",
        json.dumps({"name": "one"} | dict.fromkeys(names, user.pk)),
        content_type="application/json",
        headers={"Idempotency-Key": "key-1"} | dict.fromkeys(names, str(user.pk)),
        **dict.fromkeys(names, str(user.pk)),
    )
    assert response.status_code == 403
    assert not IdempotencyKey.objects.exists()


def test_decorator_outside_of_authentication_is_refused() -> None:
    with pytest.raises(TypeError, match="outside authentication"):
        idempotent(Entries.as_view())

    @method_decorator(idempotent, name="dispatch")
    class Outside(APIView):
        pass

    with pytest.raises(RuntimeError, match="on the handler"):
        Outside.as_view()(APIRequestFactory().post("/", {}, headers={"Idempotency-Key": "key-1"}))


def test_plain_response_of_django_is_taken_too(serve: Serve, client: APIClient) -> None:
    @api_view(["POST"])
    @idempotent
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"\x00\xff", content_type="application/octet-stream", status=202)

    serve(view)
    first, second = (post(client, {"a": 1}) for _ in range(2))
    assert (
        (first.status_code, first.content)
        == (second.status_code, second.content)
        == (202, b"\x00\xff")
    )


@api_view(["POST"])
@idempotent
def open_to_all(request: Any) -> Response:
    """Create an entry for anybody: the framework permits it unless told otherwise."""
    return Response({"id": Entry.objects.create(name="one").pk}, status=201)


def test_an_anonymous_client_has_no_scope(serve: Serve) -> None:
    serve(open_to_all)
    refused = post(Client(), {"a": 1})
    assert (refused.status_code, refused.json()["code"]) == (400, "scope_missing")
    assert not Entry.objects.exists()


def test_a_view_for_anonymous_clients_needs_a_scope(serve: Serve) -> None:
    @api_view(["POST"])
    @idempotent(scope=lambda request: request.headers.get("Client-Id", ""))
    def view(request: Any) -> Response:
        return Response({"id": Entry.objects.create(name="one").pk}, status=201)

    serve(view)
    first, second = (post(Client(), {"a": 1}, headers={"Client-Id": "till 4"}) for _ in range(2))
    assert (first.status_code, second.content, second["Idempotent-Replayed"]) == (
        201,
        first.content,
        "true",
    )
    assert post(Client(), {"a": 1}).json()["code"] == "scope_missing"


def test_the_browsable_api_needs_the_app_and_commits_nothing_without(
    serve: Serve, client: APIClient
) -> None:
    serve(open_to_all)
    page = {"Accept": "text/html"}
    assert not apps.is_installed("rest_framework")
    assert post(client, {"a": 1}, headers=page).status_code == 500
    assert not Entry.objects.exists()
    with modify_settings(INSTALLED_APPS={"append": "rest_framework"}):
        first, second = (post(client, {"a": 1}, headers=page) for _ in range(2))
    assert (first.status_code, first["Content-Type"]) == (201, "text/html; charset=utf-8")
    assert (second.content, second["Idempotent-Replayed"]) == (first.content, "true")


def test_a_project_with_json_alone_needs_no_app(serve: Serve, client: APIClient) -> None:
    @api_view(["POST"])
    @renderer_classes([renderers.JSONRenderer])
    @idempotent
    def view(request: Any) -> Response:
        return Response({"id": Entry.objects.create(name="one").pk}, status=201)

    serve(view)
    assert post(client, {"a": 1}, headers={"Accept": "text/html,*/*;q=0.8"}).status_code == 201


class Protected(IdempotentMixin, viewsets.ModelViewSet):
    """A view set whose base class protects it."""

    queryset = Entry.objects.all()
    serializer_class = EntrySerializer
    not_idempotent = ("draft",)

    @action(detail=False, methods=["get", "post"])
    def import_all(self, request: Any) -> Response:
        """Read, or write."""
        if request.method == "GET":
            return Response([])
        return Response(EntrySerializer(Entry.objects.create(name="imported")).data, status=201)

    @import_all.mapping.delete
    def forget_all(self, request: Any) -> Response:
        """Delete."""
        Entry.objects.all().delete()
        return Response(status=204)

    @action(detail=False, methods=["post"])
    def draft(self, request: Any) -> Response:
        """Write nothing."""
        return Response({})


def routes(view_set: Any) -> list[Any]:
    """Return the URLs of a view set at /entries/."""
    router = SimpleRouter()
    router.register("entries", view_set)
    return router.urls


def test_a_base_class_protects_each_unsafe_handler(client: APIClient, settings: Settings) -> None:
    settings.ROOT_URLCONF = urls = type("Urls", (), {"urlpatterns": routes(Protected)})
    assert [(view.view.rpartition(".")[2], view.methods) for view in unprotected(urls)] == [
        ("Protected", ("POST",))
    ]
    assert (
        client.get("/entries/").status_code == client.get("/entries/import_all/").status_code == 200
    )
    assert client.post("/entries/draft/").status_code == 200
    assert client.post("/entries/", {"name": "one"}).json()["code"] == "key_missing"

    def twice(method: str, url: str, key: str, data: Any = None) -> Any:
        first, second = (
            getattr(client, method)(
                url, data or {}, format="json", headers={"Idempotency-Key": key}
            )
            for _ in range(2)
        )
        assert second["Idempotent-Replayed"] == "true"
        assert (first.status_code, first.content) == (second.status_code, second.content)
        return first

    made = twice("post", "/entries/", "1", {"name": "one"}).json()
    assert twice("put", f"/entries/{made['id']}/", "2", {"name": "two"}).json()["name"] == "two"
    # partial_update() of the framework calls update(), which is protected too.
    assert (
        twice("patch", f"/entries/{made['id']}/", "3", {"name": "three"}).json()["name"] == "three"
    )
    assert twice("post", "/entries/import_all/", "4").status_code == 201
    assert twice("delete", "/entries/import_all/", "5").status_code == 204


@pytest.mark.parametrize("first", ["the parent", "the child"])
def test_a_class_has_its_own_options_and_exceptions_also_for_handlers_that_it_inherits(
    client: APIClient, settings: Settings, first: str
) -> None:
    class Parent(IdempotentMixin, viewsets.ModelViewSet):
        queryset = Entry.objects.all()
        serializer_class = EntrySerializer

    class Child(Parent):
        idempotent_options: ClassVar[dict[str, Any]] = {"required": False, "wait_seconds": 3}
        not_idempotent = ("destroy",)

    class Grandchild(Child):
        idempotent_options: ClassVar[dict[str, Any]] = {}
        not_idempotent = ()

    order = [Parent, Child, Grandchild] if first == "the parent" else [Child, Parent, Grandchild]
    urlpatterns = [
        path(f"{view.__name__}/<int:pk>/", view.as_view({"post": "create", "delete": "destroy"}))
        for view in order
    ]
    settings.ROOT_URLCONF = urls = type("Urls", (), {"urlpatterns": urlpatterns})
    found = {
        policy.path.split("/")[1]: (policy.required, policy.wait_seconds)
        for policy in policies(urls)
    }
    assert found == {"Parent": (True, 0), "Child": (False, 3), "Grandchild": (True, 0)}
    entry = Entry.objects.create(name="one")
    statuses = [
        client.delete(f"/{view}/{entry.pk}/").status_code
        for view in ("Parent", "Child", "Grandchild")
    ]
    assert statuses == [400, 204, 400]


@pytest.mark.parametrize(
    ("attributes", "statuses"),
    [
        ({"not_idempotent": ("create",)}, [201, 201]),
        ({"idempotent_options": {"retention_hours": 200}}, [400, 201]),
    ],
)
def test_a_handler_that_a_class_calls_with_super_has_the_options_of_the_class(
    client: APIClient, settings: Settings, attributes: dict[str, Any], statuses: list[int]
) -> None:
    class Parent(IdempotentMixin, viewsets.ModelViewSet):
        queryset = Entry.objects.all()
        serializer_class = EntrySerializer

    class Child(Parent):
        def create(self, request: Any, *args: Any, **kwargs: Any) -> Response:
            return super().create(request, *args, **kwargs)

    for name, value in attributes.items():
        setattr(Child, name, value)
    urlpatterns = [
        path(f"{view.__name__}/", view.as_view({"post": "create"})) for view in (Parent, Child)
    ]
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": urlpatterns})
    assert client.post("/Parent/", {"name": "one"}).status_code == 400
    answers = [
        client.post("/Child/", {"name": "one"}, headers=headers)
        for headers in ({}, {"Idempotency-Key": "1"})
    ]
    assert [answer.status_code for answer in answers] == statuses


def counted(handler: Any) -> Any:
    """Decorate a handler, as a rate limit or a schema does."""

    @wraps(handler)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return handler(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("decorator", [counted, idempotent, idempotent(wait_seconds=3)])
@pytest.mark.parametrize("routed_first", [True, False])
def test_a_handler_that_wraps_that_of_a_parent_is_protected(
    routed_first: bool, decorator: Any, client: APIClient, settings: Settings
) -> None:
    class Parent(IdempotentMixin, viewsets.ModelViewSet):
        queryset = Entry.objects.all()
        serializer_class = EntrySerializer

    parents = [path("Parent/", Parent.as_view({"post": "create"}))] if routed_first else []

    @method_decorator(decorator, name="create")
    class Child(Parent):
        pass

    settings.ROOT_URLCONF = type(
        "Urls", (), {"urlpatterns": [*parents, path("Child/", Child.as_view({"post": "create"}))]}
    )
    answers = [
        client.post("/Child/", {"name": "one"}, headers=headers)
        for headers in ({}, *[{"Idempotency-Key": "1"}] * 2)
    ]
    assert [answer.status_code for answer in answers] == [400, 201, 201]
    assert Entry.objects.count() == 1


def test_of_two_parents_the_one_that_overrides_a_handler_is_called(
    client: APIClient, settings: Settings
) -> None:
    class Base(IdempotentMixin, viewsets.ModelViewSet):
        queryset = Entry.objects.all()
        serializer_class = EntrySerializer

    class Audited(Base):
        pass

    class Limited(Base):
        def create(self, request: Any, *args: Any, **kwargs: Any) -> Response:
            return Response({}, status=402)

    class Both(Audited, Limited):
        pass

    views = [
        path(f"{view.__name__}/", view.as_view({"post": "create"}))
        for view in (Base, Audited, Both)
    ]
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": views})
    assert (
        client.post("/Both/", {"name": "one"}, headers={"Idempotency-Key": "1"}).status_code == 402
    )


def test_a_handler_keeps_its_own_options(client: APIClient, settings: Settings) -> None:
    class Own(IdempotentMixin, generics.CreateAPIView):
        queryset = Entry.objects.all()
        serializer_class = EntrySerializer
        idempotent_options: ClassVar[dict[str, Any]] = {"required": False}

        @idempotent(wait_seconds=3)
        def post(self, request: Any) -> Response:
            return Response({}, status=201)

    settings.ROOT_URLCONF = urls = type("Urls", (), {"urlpatterns": [path("own/", Own.as_view())]})
    (policy,) = policies(urls)
    assert (policy.required, policy.wait_seconds) == (True, 3)
