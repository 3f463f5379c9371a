"""Items of docs/explanation/security.md that no other file tests."""

import re
from collections.abc import Callable
from html import unescape
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest
from django.db import connection
from django.http import HttpResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone
from pytest_django import Settings

from idempotency.models import DownstreamCall, IdempotencyKey, ProcessedMessage, ProcessHeartbeat
from tests.factories import IdempotencyKeyFactory, StagedJobFactory, UserFactory
from tests.kit.ageing import lock_end
from tests.kit.database import statements
from tests.kit.serving import View, problem
from tests.kit.views import Counted, both_kinds, create, phased

MEGABYTE = 1024 * 1024

Kind = Callable[..., View]
Serve = Callable[..., None]


def anonymous(**options: Any) -> dict[str, Any]:
    """Return options for a view whose scope needs no query."""
    return {"scope": lambda request: request.headers.get("X-Account", "one"), **options}


def shapes(captured: CaptureQueriesContext) -> list[str]:
    """Return the statements without their values."""
    return [
        re.sub(r"'(?:[^']|'')*'(?:::\w+)?|\b\d+\b|b?\"[^\"]*\"", "?", query["sql"] or "")
        for query in captured
    ]


STUCK = {
    "stuck_at": timezone.now(),
    "stuck_code": "exception",
    "stuck_reason": "Somebody must look.",
}
STATES: dict[str, dict[str, Any]] = {
    "finished": {"finished": True},
    "waiting for a retry": {},
    "in flight": {"locked_until": lock_end(), "claim_token": uuid4()},
    "stuck": STUCK,
}


@both_kinds
@pytest.mark.parametrize("state", STATES)
def test_a_key_of_another_scope_runs_the_same_statements_as_one_that_nobody_has(
    state: str, kind: Kind, serve: Serve, transactional_db: None
) -> None:
    serve(view=kind(create, **anonymous()))
    key = IdempotencyKeyFactory(
        scope="other", idempotency_key="known", request_path="/view/", **STATES[state]
    )
    before = IdempotencyKey.objects.values().get(pk=key.pk)
    client = Client()
    seen = []
    for name in ("warm-up", "unknown", "known"):
        with statements() as captured:
            answer = client.post("/view/", headers={"Idempotency-Key": name})
        seen.append((answer.status_code, sorted(answer.headers), shapes(captured)))
    assert seen[1] == seen[2]
    assert seen[1][0] == 201
    assert IdempotencyKey.objects.values().get(pk=key.pk) == before


@both_kinds
@pytest.mark.parametrize(
    "value",
    ["x" * MEGABYTE, '"' + "\\\\" * MEGABYTE, '"a"' + ';a="b"' * MEGABYTE + ";", "é" * MEGABYTE],
)
def test_a_giant_key_is_refused_without_a_statement(
    value: str, kind: Kind, serve: Serve, transactional_db: None
) -> None:
    serve(view=kind(work := Counted(), **anonymous()))
    with statements() as captured:
        answer = Client().post("/view/", headers={"Idempotency-Key": value})
    assert problem(answer)["code"] == "key_invalid"
    assert (len(captured), work.runs) == (0, 0)
    assert len(answer.content) < 1000


@both_kinds
def test_a_giant_body_is_refused_without_a_statement(
    kind: Kind, serve: Serve, settings: Settings, transactional_db: None
) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = MEGABYTE
    serve(view=kind(work := Counted(), **anonymous()))
    with statements() as captured:
        answer = Client(raise_request_exception=False).post(
            "/view/",
            b"x" * (MEGABYTE + 1),
            content_type="text/plain",
            headers={"Idempotency-Key": "key-1"},
        )
    assert answer.status_code in (400, 413)
    assert (len(captured), work.runs) == (0, 0)


@both_kinds
@pytest.mark.parametrize(
    "body",
    [
        "[" * 100_000,
        "[1e999999999, -1e-999999999]",
        "9" * 100_000,
        '{"a":' * 50_000 + "1" + "}" * 50_000,
    ],
)
def test_a_body_that_is_made_to_be_hard_to_compare_runs_the_same_statements(
    body: str, kind: Kind, serve: Serve, transactional_db: None
) -> None:
    serve(view=kind(create, **anonymous()))
    client = Client()
    seen = []
    for key, sent in (("warm-up", "{}"), ("easy", "{}"), ("hard", body)):
        with statements() as captured:
            answer = client.post(
                "/view/", sent, content_type="application/json", headers={"Idempotency-Key": key}
            )
        seen.append((answer.status_code, len(captured)))
    assert seen[1] == seen[2]


@both_kinds
@pytest.mark.parametrize("header", ["Location", "X-Made-Up"])
def test_a_stored_header_cannot_split_an_answer(
    header: str, kind: Kind, serve: Serve, transactional_db: None
) -> None:
    serve(view=kind(create, **anonymous()))
    client = Client(raise_request_exception=False)
    assert client.post("/view/", headers={"Idempotency-Key": "key-1"}).status_code == 201
    IdempotencyKey.objects.update(response_headers={header: "/x\r\nSet-Cookie: admin=1"})
    answer = client.post("/view/", headers={"Idempotency-Key": "key-1"})
    assert answer.status_code == 500
    assert header not in answer
    assert "Set-Cookie" not in answer


@both_kinds
@pytest.mark.parametrize(
    "key", ["a\r\nSet-Cookie: admin=1", '"a\r\nX: y"', "a\x00b", "<script>alert(1)</script>\n"]
)
def test_a_key_puts_nothing_into_the_answer(
    key: str, kind: Kind, serve: Serve, transactional_db: None
) -> None:
    serve(view=kind(create, **anonymous()))
    answer = Client().generic("POST", "/view/", HTTP_IDEMPOTENCY_KEY=key)
    assert answer.status_code == 400
    assert "Set-Cookie" not in answer
    assert "admin" not in str(answer.headers) + answer.content.decode()
    assert "script" not in answer.content.decode()


@both_kinds
@pytest.mark.parametrize(
    "text",
    ["'; DROP TABLE idempotency_idempotencykey; --", "%s %(scope)s {0}", "%' OR '1'='1", "\\'"],
)
def test_key_scope_path_and_body_are_never_part_of_a_statement(
    text: str, kind: Kind, serve: Serve, transactional_db: None
) -> None:
    serve(view=kind(work := Counted(), **anonymous()))
    quoted = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    sent: dict[str, Any] = {
        "content_type": "text/plain",
        "headers": {"Idempotency-Key": quoted, "X-Account": text, "Accept": text},
    }
    answers = [Client().post("/view/", text, query_params={"q": text}, **sent) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[1]["Idempotent-Replayed"] == "true"
    key = IdempotencyKey.objects.get()
    assert (key.scope, key.idempotency_key, bytes(key.request_body or b"")) == (
        f"scope={text}",
        text,
        text.encode() if kind is phased else b"",
    )
    assert work.runs == 1


def test_what_a_client_sent_is_text_in_the_admin(client: Client, transactional_db: None) -> None:
    script = "<script>alert(1)</script>"
    key = IdempotencyKeyFactory(
        scope=script, idempotency_key=script, request_path=f"/{script}",
        request_body=f'{{"a": "{script}"}}'.encode(), request_headers={"Accept": script},
        last_error=script, claim_token=uuid4(), recovery_point=script,
        history=[{"at": "2026-01-01T00:00:00Z", "event": script, "detail": script}],
        **STUCK | {"stuck_code": script, "stuck_reason": script},
    )  # fmt: skip
    failed = {"failed_at": timezone.now(), "last_error": script}
    job = StagedJobFactory(
        job_name=script, job_args={"a": script}, queue=script, idempotency_key=key, **failed
    )
    call = DownstreamCall.objects.create(key=key, name=script, token=uuid4(), result={"a": script})
    message = ProcessedMessage.objects.create(source=script, message_id=script)
    ProcessHeartbeat.objects.create(name="reap_keys", host=script, pid=1)
    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    lists = [
        reverse(f"admin:idempotency_{row._meta.model_name}_changelist")
        for row in (key, job, call, message)
    ]
    pages = [
        f"{url}{row.pk}/change/" for url, row in zip(lists, (key, job, call, message), strict=True)
    ]
    buttons = [
        unescape(url)
        for url in re.findall(r'href="([^"]+/press/[^"]+)"', client.get(pages[0]).text)
    ]
    searches = [
        f"{lists[0]}?{name}={quote(script)}"
        for name in ("q", "recovery_point", "stuck_code", "state", "age")
    ]
    questions = [
        f"{lists[0]}bulk/hand_back/",
        f"{lists[0]}bulk/acknowledge/",
        f"{lists[1]}bulk/discard/",
    ]
    urls = [*lists, *pages, *buttons, *searches, *questions, reverse("admin:idempotency_dashboard")]
    answers = [client.get(url) for url in urls]
    assert len(buttons) == 3
    for answer in answers:
        assert answer.status_code == 200
        assert script not in answer.text
    assert sum("alert(1)" in answer.text for answer in answers) > 10


@both_kinds
def test_what_identifies_a_client_is_kept_of_no_request_and_of_no_response(
    kind: Kind, serve: Serve, transactional_db: None
) -> None:
    secret = "s3cr3t-of-the-client"

    def work(request: Any) -> HttpResponse:
        response = HttpResponse(
            headers={"Authorization": secret, "WWW-Authenticate": secret, "X-Request-Id": secret}
        )
        response.set_cookie("session", secret)
        return response

    serve(view=kind(work, **anonymous()))
    client = Client()
    client.cookies["sessionid"] = secret
    names = (
        "Authorization",
        "Proxy-Authorization",
        "X-Api-Key",
        "X-Csrftoken",
        "X-Forwarded-For",
        "User-Agent",
    )
    client.post("/view/", headers={"Idempotency-Key": "key-1"} | dict.fromkeys(names, secret))
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM idempotency_idempotencykey")
        assert secret not in repr(
            [
                [bytes(v) if isinstance(v, memoryview) else v for v in row]
                for row in cursor.fetchall()
            ]
        )
