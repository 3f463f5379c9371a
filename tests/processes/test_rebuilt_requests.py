"""The rebuilt request: the view sees the host, path, language and body that the client sent."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest
from django.conf.urls.i18n import i18n_patterns
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    JsonResponse,
    RawPostDataException,
)
from django.test.client import MULTIPART_CONTENT
from django.urls import get_script_prefix, get_urlconf, path, set_script_prefix, set_urlconf
from django.utils import timezone, translation
from django.utils.decorators import method_decorator
from django.views import View as ClassBasedView
from django.views.decorators.csrf import csrf_protect
from pytest_django import Settings

from idempotency._http import stored_request
from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from idempotency.reaper import reap_once
from tests.factories import IdempotencyKeyFactory
from tests.kit.ageing import abandon, make_older
from tests.kit.serving import Sender
from tests.kit.shop import Shop, open_shop
from tests.kit.views import over_key, two_phases
from tests.models import Account

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def shop(serve: Any) -> Shop:
    """Return the shop, which answers at /view/."""
    return open_shop(serve)


@pytest.mark.parametrize("mounted_at", ["", "/app", "/ü"])
def test_the_view_sees_the_host_that_its_client_saw_and_the_path_that_the_site_is_mounted_at(
    shop: Shop, sender: Sender, settings: Settings, mounted_at: str
) -> None:
    settings.USE_X_FORWARDED_HOST, settings.ALLOWED_HOSTS = True, ["rides.example"]
    script_name = mounted_at.encode().decode("latin-1")
    set_script_prefix(mounted_at)  # A server does, the client of the tests does not.
    try:
        sender.send(
            headers={"Host": "app:8000", "X-Forwarded-Host": "rides.example"},
            SCRIPT_NAME=script_name,
        )
    finally:
        set_script_prefix("/")
    abandon()
    complete_once()
    by_client, by_completer = shop.seen
    assert by_completer == by_client
    assert by_completer["host"] == "rides.example"
    assert unquote(by_completer["receipt"]) == f"http://rides.example{mounted_at}/view/"
    assert get_script_prefix() == "/"


@pytest.mark.parametrize(
    ("secure", "host"), [(True, "testserver:8443"), (True, "testserver"), (False, "testserver")]
)
def test_the_view_sees_the_scheme_and_the_port_of_its_client(
    shop: Shop, sender: Sender, secure: bool, host: str
) -> None:
    sender.send(headers={"Host": host}, secure=secure)
    abandon()
    complete_once()
    by_client, by_completer = shop.seen
    assert by_completer == by_client
    assert by_completer["receipt"] == f"{'https' if secure else 'http'}://{host}/view/"
    assert stored_request.rebuild(IdempotencyKey.objects.get()).META["SERVER_NAME"] == "testserver"


def test_what_is_too_long_to_be_stored_is_cut(shop: Shop, sender: Sender, serve: Any) -> None:
    serve(view=idempotent(lambda request: HttpResponse(status=201)))
    assert sender.send(method="M" * 25, REMOTE_ADDR="9" * 60).status_code == 201
    key = IdempotencyKey.objects.get()
    assert (key.request_method, key.remote_addr) == ("M" * 20, "9" * 45)


@pytest.mark.parametrize("content_type", [MULTIPART_CONTENT, "application/json"])
def test_a_body_that_was_read_as_a_stream_is_a_mistake_of_the_project(
    content_type: str, serve: Any, sender: Sender
) -> None:
    """All such bodies would be equal, and each would get the answer of the first."""
    protected = idempotent(lambda request: HttpResponse(status=201))

    def reads(request: HttpRequest) -> HttpResponseBase:
        request.read(10)
        return protected(request)

    serve(view=reads)
    sender.client.raise_request_exception = True
    with pytest.raises(RawPostDataException, match="read as a stream"):
        sender.client.post(
            "/view/",
            {"amount": "1"},
            content_type=content_type,
            headers={"Idempotency-Key": "key-1"},
        )


def test_a_view_that_checks_for_a_csrf_token_is_run(shop: Shop, sender: Sender, serve: Any) -> None:
    """The token of the client was checked before its key was stored."""
    serve(view=csrf_protect(shop.view))
    sender.send()
    abandon()
    shop.broken = False
    assert complete_once() == CompletePass(finished=1)


def test_a_user_model_without_activity_is_active(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_request, "get_user_model", lambda: Account)
    account = Account.objects.create(name="a user of another model")
    assert stored_request.sender_of(IdempotencyKeyFactory.build(user_id=account.pk)) == account


def test_what_a_proxy_that_is_not_trusted_forwards_is_not_believed(
    shop: Shop, sender: Sender, settings: Settings
) -> None:
    settings.ALLOWED_HOSTS = ["rides.example"]
    forwarded = {
        "X-Forwarded-Host": "evil.example",
        "X-Forwarded-For": "192.0.2.7",
        "X-Forwarded-Proto": "https",
    }
    sender.send(headers={"Host": "rides.example", **forwarded})
    abandon()
    complete_once()
    by_client, by_completer = shop.seen
    assert by_completer == by_client
    assert (by_completer["address"], by_completer["receipt"]) == (
        "127.0.0.1",
        "http://rides.example/view/",
    )


def test_the_view_finds_addresses_in_the_urlconf_of_its_request(
    shop: Shop, sender: Sender, settings: Settings, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shops = ModuleType("urls_of_the_shops")
    shops.urlpatterns = [path("view/", shop.view, name="view")]
    monkeypatch.setitem(sys.modules, shops.__name__, shops)
    serve(other=shop.view)
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.to_the_shops"]
    sender.send()
    set_urlconf(None)
    abandon()
    shop.broken = False
    assert complete_once() == CompletePass(finished=1)
    assert get_urlconf() is None


def to_the_shops(get_response: Any) -> Any:
    """A middleware that chooses the URLconf of a host."""

    def choose(request: HttpRequest) -> HttpResponseBase:
        request.urlconf = "urls_of_the_shops"
        return get_response(request)

    return choose


class OfTheShop:
    """The URLs of another host."""

    urlpatterns: list[Any] = []


def urls_by_host(get_response: Any) -> Any:
    """Choose the URLs by the host, as Django lets a middleware do."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        if request.get_host() == "shop.example.com":
            request.urlconf = OfTheShop
        return get_response(request)

    return middleware


@pytest.mark.parametrize("later", [complete_once, reap_once])
def test_a_request_of_another_host_is_not_ended_by_a_view_of_this_one(
    later: Callable[[], Any], serve: Any, sender: Sender, settings: Settings
) -> None:
    ran: list[str] = []

    def down(key: IdempotencyKey) -> None:
        raise OSError

    def here(key: IdempotencyKey) -> HttpResponseBase:
        ran.append("here")
        return JsonResponse({}, status=410)

    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.urls_by_host"]
    settings.ALLOWED_HOSTS = ["*"]
    serve(view=over_key(here, on_abandon=here))
    OfTheShop.urlpatterns = [path("view/", over_key(down))]
    assert sender.send(headers={"Host": "shop.example.com"}).status_code == 500
    make_older(73 * 3600, "created_at", "last_run_at", "next_run_at")
    later()

    assert ran == []


def test_a_host_that_is_not_allowed_is_kept_as_it_came(
    sender: Sender, serve: Any, settings: Settings
) -> None:
    serve(view=idempotent(recovery_points=[])(lambda request: HttpResponse(status=503)))
    settings.ALLOWED_HOSTS = ["rides.example"]
    # it refuses
    settings.MIDDLEWARE = [
        name for name in settings.MIDDLEWARE if not name.endswith(".CommonMiddleware")
    ]
    sender.send(headers={"Host": "elsewhere.example"})
    assert IdempotencyKey.objects.get().request_headers["Host"] == "elsewhere.example"


@pytest.fixture
def in_two_languages(settings: Settings) -> Any:
    """Return a function that puts views below i18n_patterns, as a site in English and German has
    them."""
    settings.LANGUAGES = [("en", "English"), ("de", "German")]
    settings.LANGUAGE_CODE = "en"
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]

    def put(view: Any, *, default_in_path: bool = True) -> None:
        patterns = i18n_patterns(
            path("view/", view, name="view"), prefix_default_language=default_in_path
        )
        settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": patterns})

    yield put
    translation.activate("en")


@pytest.mark.parametrize("default_in_path", [True, False])
@pytest.mark.parametrize("language", ["en", "de"])
def test_a_view_below_i18n_patterns_is_found_and_speaks_its_language(
    language: str, default_in_path: bool, shop: Shop, sender: Sender, in_two_languages: Any
) -> None:
    in_two_languages(shop.view, default_in_path=default_in_path)
    url = "/view/" if language == "en" and not default_in_path else f"/{language}/view/"
    other = {"en": "de", "de": "en"}[language]
    assert sender.send(url, headers={"Accept-Language": other}).status_code == 500
    abandon()
    shop.broken = False
    translation.activate(other)  # A process of its own has none, and the admin that of the person.
    assert complete_once() == CompletePass(finished=1)
    by_client, by_completer = shop.seen
    assert by_completer == by_client
    assert by_client["language"] == language


@pytest.mark.parametrize("chosen_by", ["header", "cookie"])
def test_a_client_is_spoken_to_in_the_language_that_a_middleware_chose(
    chosen_by: str, shop: Shop, sender: Sender, settings: Settings, in_two_languages: Any
) -> None:
    settings.ROOT_URLCONF = type(
        "Urls", (), {"urlpatterns": [path("view/", shop.view, name="view")]}
    )
    if chosen_by == "cookie":
        sender.client.cookies["django_language"] = "de"
    sender.send(headers={"Accept-Language": "de" if chosen_by == "header" else "en"})
    abandon()
    translation.activate("en")  # as in another process
    complete_once()
    assert [run["language"] for run in shop.seen] == ["de", "de"]


def test_a_path_that_looks_like_a_language_is_none_without_i18n_patterns(
    shop: Shop, sender: Sender, settings: Settings, in_two_languages: Any
) -> None:
    settings.ROOT_URLCONF = type(
        "Urls", (), {"urlpatterns": [path("de/view/", shop.view, name="view")]}
    )
    sender.send("/de/view/", headers={"Accept-Language": "en"})
    abandon()
    complete_once()
    assert [run["language"] for run in shop.seen] == ["en", "en"]


async def as_the_user_wants_it(request: HttpRequest, key: IdempotencyKey) -> None:
    """Activate what a middleware of the project would have."""
    timezone.activate("Pacific/Auckland")
    translation.activate("de")


def test_what_prepare_request_activates_holds_for_the_view_and_no_longer(
    serve: Any, sender: Sender, settings: Settings
) -> None:
    seen: list[tuple[str | None, str]] = []

    def view(request: HttpRequest) -> HttpResponse:
        seen.append((translation.get_language(), timezone.get_current_timezone_name()))
        return HttpResponse(status=503)

    settings.IDEMPOTENCY = {"PREPARE_REQUEST": as_the_user_wants_it}
    serve(view=idempotent(recovery_points=[])(view))
    sender.send()
    abandon()
    before = (translation.get_language(), timezone.get_current_timezone_name())
    complete_once()
    assert seen == [before, ("de", "Pacific/Auckland")]
    assert (translation.get_language(), timezone.get_current_timezone_name()) == before


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "multipart"])
def test_a_form_comes_back_as_it_was(shop: Shop, sender: Sender, content_type: str) -> None:
    extra = {"headers": {"Idempotency-Key": "key"}}
    if content_type == "multipart":
        sender.client.post("/view/", {"a": "1 ü&="}, **extra)
    else:
        sender.client.post("/view/", "a=1+%C3%BC%26%3D", content_type=content_type, **extra)
    abandon()
    shop.broken = False
    assert complete_once() == CompletePass(finished=1)
    assert [run["body"] for run in shop.seen] == [{"a": "1 ü&="}] * 2


@pytest.mark.postgres
@pytest.mark.parametrize(
    "query",
    [
        "name=é",
        "name=%C3%A9",
    ],
)
def test_the_completer_sees_the_query_that_the_client_sent(
    query: str, serve: Any, sender: Sender
) -> None:
    seen = []

    def second(request: HttpRequest) -> HttpResponse:
        seen.append(request.GET["name"])
        if len(seen) == 1:
            raise OSError("down")
        return HttpResponse(status=201)

    serve(view=two_phases(lambda request: None, second))
    sender.send(f"/view/?{query}")
    abandon()
    complete_once()
    assert seen == ["é", "é"]


@pytest.mark.postgres
def test_the_completer_runs_the_path_that_the_client_sent(
    sender: Sender, settings: Settings
) -> None:
    seen = []

    def view(request: HttpRequest, rest: str) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            seen.append(rest)
            if len(seen) == 1:
                raise OSError("down")
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse(status=201))
        return key.response()

    protected = idempotent(recovery_points=["unused"])(view)
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("<path:rest>", protected)]})
    sender.send("/x", PATH_INFO="//alice/pay")
    abandon()
    complete_once()
    assert seen == ["/alice/pay"] * 2


@pytest.mark.postgres
def test_the_completer_finishes_what_a_method_of_a_class_has_begun(
    serve: Any, sender: Sender
) -> None:
    broken = [1]

    class Pay(ClassBasedView):
        @method_decorator(idempotent(recovery_points=["unused"]))
        def post(self, request: HttpRequest) -> HttpResponseBase:
            key = request.idempotency_key
            for _ in key.phases():
                if broken:
                    raise OSError("down")
                with atomic_phase(key) as phase:
                    phase.set_response(HttpResponse(status=201))
            return key.response()

    serve(view=Pay.as_view())
    assert sender.send().status_code == 500
    broken.clear()
    abandon()
    assert complete_once() == CompletePass(finished=1)
    answer = sender.send()
    assert (answer.status_code, answer["Idempotent-Replayed"]) == (201, "true")


@pytest.mark.postgres
def test_a_large_form_is_the_same_for_the_completer(serve: Any, sender: Sender) -> None:
    broken = [1]

    def first(request: HttpRequest) -> None:
        if broken:
            raise OSError("down")
        assert len(request.POST["text"]) == 1_000_000

    serve(view=two_phases(first, lambda request: HttpResponse(status=201)))
    text = "é" * 1_000_000
    body = f'--x\r\nContent-Disposition: form-data; name="text"\r\n\r\n{text}\r\n--x--\r\n'.encode()
    assert sender.send(body=body, content_type="multipart/form-data; boundary=x").status_code == 500
    broken.clear()
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert IdempotencyKey.objects.get().response_code == 201
