"""The admin: what became of each request, for a person who may look and not touch."""

import re
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission
from django.utils import timezone

from idempotency._states import KeyState
from idempotency.admin import reading
from idempotency.models import DownstreamCall, IdempotencyKey, ProcessedMessage, StagedJob
from tests.factories import IdempotencyKeyFactory, RideFactory, StagedJobFactory, UserFactory
from tests.kit.ageing import ago, lock_end
from tests.models import Entry

pytestmark = pytest.mark.django_db

KEYS = "/admin/idempotency/idempotencykey/"
LISTS = [
    f"/admin/idempotency/{model}/"
    for model in ("idempotencykey", "stagedjob", "downstreamcall", "processedmessage")
]


@pytest.fixture
def staff(client):
    """Return a client signed in as an administrator."""
    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    return client


def event(minute, name, detail):
    return {"at": f"2026-11-21T06:{minute:02}:00Z", "event": name, "detail": detail}


def one_of_each_state():
    """Create a key in each state; return them by the name of the state."""
    old = {"created_at": ago(hours=1), "last_run_at": ago(minutes=30)}
    stuck = {
        "stuck_at": ago(minutes=1),
        "stuck_code": "in_doubt",
        "stuck_reason": "Somebody must look.",
    }
    return {
        "finished": IdempotencyKeyFactory(finished=True),
        "in flight": IdempotencyKeyFactory(locked_until=lock_end(), claim_token=uuid4()),
        "refused": IdempotencyKeyFactory(refused_at=timezone.now(), **old),
        "stuck": IdempotencyKeyFactory(**stuck, **old),
        "acknowledged": IdempotencyKeyFactory(acknowledged_at=timezone.now(), **stuck, **old),
        "abandoned": IdempotencyKeyFactory(**old),
        "waiting for a retry": IdempotencyKeyFactory(),
    }


def shown(response):
    return {key.pk for key in response.context["cl"].result_list}


def test_the_state_filter_and_the_state_shown_agree(staff):
    keys = one_of_each_state()
    assert {name: key.pk for name, key in keys.items()} == dict(
        IdempotencyKey.objects.with_state().values_list("state", "pk")
    )
    assert {*keys} == {*KeyState}
    for name, key in keys.items():
        response = staff.get(KEYS, {"state": name.replace(" ", "_")})
        assert shown(response) == {key.pk}, name
        assert f'class="field-state">{name}</td>' in response.text
    assert shown(staff.get(KEYS)) == {key.pk for key in keys.values()}


def test_a_key_is_found_as_a_whole_or_by_its_number(staff):
    key = IdempotencyKeyFactory(idempotency_key="Order-1")
    IdempotencyKeyFactory(idempotency_key="Order-12")
    assert shown(staff.get(KEYS, {"q": "Order-1"})) == {key.pk}
    assert shown(staff.get(KEYS, {"q": str(key.pk)})) == {key.pk}
    for term in ("order-1", "Ord", "9" * 30, "²"):
        assert shown(staff.get(KEYS, {"q": term})) == set()


@pytest.mark.parametrize(
    "query",
    [
        {"q": "9" * 4400},
        {"q": "\0"},
        {"q": "\u0663"},
        {"recovery_point": "\0"},
        {"stuck_code": "a\0"},
        {"state": "\0"},
        {"age": "\0"},
        {"p": "9" * 4400},
        {"scope": "\0"},
        {"id": "9" * 4400},
        {"seed__gte": "a"},
        {"idempotency_key__regex": "("},
        {"history__x": "\0"},
    ],
    ids=lambda query: f"{query}"[:30],
)
def test_no_query_of_the_list_is_an_error_of_the_server(staff, query):
    IdempotencyKeyFactory(recovery_point="ride_created")
    assert staff.get(KEYS, query, follow=True).status_code in (200, 400)


@pytest.mark.parametrize(
    "lookup",
    [
        "seed__gte",
        "claim_token__gte",
        "idempotency_key__regex",
        "history__0__event",
        "user__password__startswith",
    ],
)
def test_a_lookup_that_is_no_filter_of_the_page_is_refused(staff, lookup):
    """Its answer would tell, bit by bit, what no page shows."""
    IdempotencyKeyFactory()
    for page in ("", "csv/"):
        assert staff.get(f"{KEYS}{page}", {lookup: "a"}).status_code == 400


@pytest.mark.parametrize(
    ("url", "name"), [(LISTS[1], "job_name"), (LISTS[2], "name"), (LISTS[3], "source")]
)
def test_no_filter_of_another_list_is_one_either(staff, url, name):
    assert staff.get(url, {name: "\0"}, follow=True).status_code in (200, 400)


@pytest.mark.parametrize("number", ["9" * 23, "9" * 4400])
def test_a_page_of_a_number_that_no_key_can_have_is_not_there(staff, number):
    for page in ("change/", "history/", "press/complete/"):
        assert staff.get(f"{KEYS}{number}/{page}").status_code in (302, 404)


def test_a_value_that_no_row_can_have_is_found_in_none(staff):
    IdempotencyKeyFactory()
    for name in ("recovery_point", "stuck_code"):
        assert shown(staff.get(KEYS, {name: "\0"})) == set()


def test_the_list_costs_the_same_for_one_key_and_for_fifty(staff, django_assert_max_num_queries):
    for count in (1, 49):
        for _ in range(count):
            IdempotencyKeyFactory(
                user=UserFactory(), history=[{"at": "", "event": "claimed", "detail": ""}]
            )
        with django_assert_max_num_queries(5) as queries:
            staff.get(KEYS)
        of_keys = [
            query["sql"] for query in queries.captured_queries if "idempotencykey" in query["sql"]
        ]
        assert len(of_keys) == 2
        assert not any("JOIN" in sql or "request_body" in sql for sql in of_keys)
        assert all("LIMIT" in sql for sql in of_keys if "COUNT" in sql), (
            "a count must not read the whole table"
        )


def test_a_long_list_is_counted_up_to_a_limit(staff, monkeypatch):
    monkeypatch.setattr(reading, "MAX_COUNT", 3)
    monkeypatch.setattr(reading, "MAX_DEPTH", 8)
    monkeypatch.setattr(reading.ReadOnlyAdmin, "list_per_page", 2)
    IdempotencyKeyFactory.create_batch(3)
    assert "3 idempotency keys" in staff.get(KEYS).text
    IdempotencyKeyFactory.create_batch(6)
    counted = {page: staff.get(KEYS, {"p": page}) for page in ("", "2", "3", "4")}
    assert [f"{page.context['cl'].result_count}" for page in counted.values()] == [
        "3+",
        "6+",
        "8+",
        "8+",
    ]
    assert all("3+ idempotency keys" in " ".join(page.text.split()) for page in [counted[""]])
    assert {len(shown(page)) for page in counted.values()} == {2}


def test_a_key_shows_its_request_its_response_and_its_history(staff):
    key = IdempotencyKeyFactory(
        finished=True,
        request_body=b'{"note": "<script>alert(1)</script>", "place": "Gr\xc3\xbcnau"}',
        response_body=b'{"ride": {"id": 7}}',
        last_error="ConnectionError: no route\nto host",
        history=[
            {"at": "2026-11-21T06:00:00Z", "event": "claimed", "detail": "client"},
            {"at": "2026-11-21T06:00:01Z", "event": "recovery point", "detail": "ride_created"},
        ],
    )
    page = staff.get(f"{KEYS}{key.pk}/change/").text
    assert "Grünau" in page
    assert "<script>alert" not in page
    assert "&quot;id&quot;: 7" in page
    assert page.index("<strong>claimed</strong> client") < page.index(
        "<strong>recovery point</strong> ride_created"
    )
    assert "no route" in page


@pytest.mark.parametrize(
    "body", [None, b"", b"\xff\xfe", b"[" * 5000, b"x" * 100_000, b'{"name": "\\ud800"}']
)
def test_any_body_can_be_shown(staff, body):
    key = IdempotencyKeyFactory(finished=True, request_body=body, response_body=body)
    assert staff.get(f"{KEYS}{key.pk}/change/").status_code == 200


@pytest.mark.postgres
@pytest.mark.full
def test_a_key_of_any_depth_can_be_looked_at(staff):
    broken = []
    for depth in range(700, 1000, 3):
        key = IdempotencyKeyFactory(request_body=b"[" * depth + b"]" * depth)
        if staff.get(f"{KEYS}{key.pk}/change/").status_code != 200:
            broken.append(depth)
    assert broken == []


def test_a_key_whose_user_is_gone_can_be_shown(staff):
    key = IdempotencyKeyFactory(user_id=987654)
    assert "987654" in staff.get(KEYS).text
    assert "987654" in staff.get(f"{KEYS}{key.pk}/change/").text


@pytest.mark.parametrize("url", LISTS)
def test_nothing_can_be_added_changed_or_deleted(staff, url):
    assert staff.get(f"{url}add/").status_code == 403
    rows = {
        "idempotencykey": lambda: IdempotencyKeyFactory(),
        "stagedjob": lambda: StagedJobFactory(idempotency_key=IdempotencyKeyFactory()),
        "downstreamcall": lambda: DownstreamCall.objects.create(
            key=IdempotencyKeyFactory(), name="sms", token=uuid4()
        ),
        "processedmessage": lambda: ProcessedMessage.objects.create(
            source="stripe", message_id="evt_1"
        ),
    }
    row = rows[url.split("/")[3]]()
    assert staff.get(url).status_code == 200
    assert staff.get(f"{url}{row.pk}/change/").status_code == 200
    assert staff.post(f"{url}{row.pk}/change/", {"job_name": "x"}).status_code == 403
    assert staff.post(f"{url}{row.pk}/delete/", {"post": "yes"}).status_code == 403
    staff.post(url, {"action": "delete_selected", "_selected_action": [str(row.pk)], "post": "yes"})
    assert type(row).objects.filter(pk=row.pk).exists()


def test_failed_and_waiting_jobs_can_be_told_apart(staff):
    waiting, failed = (
        StagedJobFactory(),
        StagedJobFactory(failed_at=timezone.now(), last_error="ValueError: no\nmore"),
    )
    assert shown(staff.get(LISTS[1], {"state": "waiting"})) == {waiting.pk}
    assert shown(staff.get(LISTS[1], {"state": "failed"})) == {failed.pk}
    assert StagedJob.objects.count() == 2


def test_who_may_not_view_keys_sees_none(client):
    user = UserFactory(is_staff=True)
    client.force_login(user)
    assert client.get(KEYS).status_code == 403
    user.user_permissions.add(Permission.objects.get(codename="view_idempotencykey"))
    assert client.get(KEYS).status_code == 200
    assert IdempotencyKey.objects.count() == 0


def test_the_list_says_how_far_each_request_came_who_sent_it_and_what_stopped_it(staff):
    user = UserFactory(username="jane")
    stuck = {"stuck_at": timezone.now(), "stuck_code": "call_in_doubt", "stuck_reason": "Look."}
    IdempotencyKeyFactory(
        recovery_point="ride_created", user=user, last_error="OSError: down\nmore", **stuck
    )
    IdempotencyKeyFactory(recovery_point="renamed", last_error="ValueError: half\nof it")
    IdempotencyKeyFactory(finished=True, last_error="OSError: once")
    IdempotencyKeyFactory(request_path="/nowhere")
    page = staff.get(KEYS).text
    for shown_there in (
        "ride_created (2/4)",
        ">renamed<",
        "started<",
        f"jane ({user.pk})",
        ">Look.<",
        ">ValueError: half …<",
    ):
        assert shown_there in page
    assert re.search("call_in_doubt</strong><br><a [^>]+>Look.</a>", page)
    assert "OSError" not in page, "the reason of a stuck key, and no error of a finished one"


def test_a_line_shows_where_the_key_stands_and_the_errors_on_the_way(staff):
    key = IdempotencyKeyFactory(
        recovery_point="ride_created",
        history=[
            event(0, "claimed", "client"),
            event(1, "recovery point", "ride_created"),
            event(2, "error", "OSError: down"),
            event(3, "error", "OSError: <down>"),
        ],
    )
    response = staff.get(f"{KEYS}{key.pk}/change/")
    assert [(stop.name, stop.place, stop.errors) for stop in response.context["line"]] == [
        ("started", "passed", 0), ("ride_created", "here", 2), ("charge_created", "ahead", 0),
        ("finished", "ahead", 0),
    ]  # fmt: skip
    assert "OSError: &lt;down&gt;" in response.text


def test_of_a_point_that_the_code_does_not_know_only_the_history_tells_what_was_passed(staff):
    history = [event(1, "recovery point", "ride_created"), event(2, "recovery point", "renamed")]
    key = IdempotencyKeyFactory(recovery_point="renamed", history=history)
    line = staff.get(f"{KEYS}{key.pk}/change/").context["line"]
    names, places = zip(*((stop.name, stop.place) for stop in line), strict=True)
    assert names == ("started", "ride_created", "renamed", "charge_created", "finished")
    assert places == ("passed", "passed", "unknown", "ahead", "ahead")


def places(staff, key):
    return [stop.place for stop in staff.get(f"{KEYS}{key.pk}/change/").context["line"]]


def test_the_line_of_a_finished_key_is_passed_to_its_end(staff):
    history = [
        event(0, "claimed", "client"),
        *(event(1, "recovery point", name) for name in ("ride_created", "charge_created")),
    ]
    key = IdempotencyKeyFactory(finished=True, history=history)
    assert places(staff, key) == ["passed"] * 4
    for path in ("/rides/7/texts", "/nowhere"):
        assert (
            places(staff, IdempotencyKeyFactory(finished=True, request_path=path)) == ["passed"] * 2
        )


@pytest.mark.parametrize(
    ("code", "last"),
    [(402, ("finished", "status 402")), (409, ("answered", "status 409, by jane"))],
)
def test_a_point_that_no_phase_committed_is_skipped(staff, code, last):
    history = [
        event(0, "claimed", "client"),
        event(1, "recovery point", "ride_created"),
        event(2, *last),
    ]
    key = IdempotencyKeyFactory(finished=True, response_code=code, history=history)
    assert places(staff, key) == ["passed", "passed", "skipped", "passed"]
    page = staff.get(f"{KEYS}{key.pk}/change/")
    assert page.context["heading"] == f"Finished: answered {code}"
    assert not re.search(r"charge_created</span>\s*<span[^>]*>reached", page.text)


def test_a_skipped_point_before_the_marker_is_no_passed_one(staff):
    history = [event(0, "claimed", "client"), event(1, "recovery point", "charge_created")]
    key = IdempotencyKeyFactory(recovery_point="charge_created", history=history)
    assert places(staff, key) == ["passed", "skipped", "here", "ahead"]


@pytest.mark.parametrize(
    "history",
    [[], [event(0, "recovery point", "ride_created")], [event(0, "claimed", "client")] * 49],
)
def test_what_a_cut_history_does_not_hold_may_have_been_reached(staff, history):
    key = IdempotencyKeyFactory(finished=True, history=history)
    assert places(staff, key)[2] == "unrecorded"


def test_what_belongs_to_a_key_is_shown_with_links_to_what_the_person_may_see(staff, client):
    key = IdempotencyKeyFactory()
    ride = RideFactory(idempotency_key=key)
    StagedJobFactory(idempotency_key=key, failed_at=timezone.now(), last_error="ImportError: gone")
    DownstreamCall.objects.create(key=key, name="sms", token=uuid4())
    entries = [Entry.objects.create(name="hidden relation", idempotency_key=key)]
    page = staff.get(f"{KEYS}{key.pk}/change/").text
    link = f'<a href="/admin/rides_demo/ride/{ride.pk}/change/">'
    for shown_there in (link, f"entry: {entries[0].pk}", "ImportError: gone", "result unknown"):
        assert shown_there in page
    user = UserFactory(is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_idempotencykey"))
    client.force_login(user)
    page = client.get(f"{KEYS}{key.pk}/change/").text
    assert link not in page
    assert f"ride: {ride.pk}" in page


def test_what_a_client_sent_is_text(staff):
    sent = {
        "request_body": b'{"note": "<b>", "half": "\\ud800"}',
        "request_path": "/rides?a=<b>",
        "last_error": "<b>\n<b>",
    }
    page = staff.get(f"{KEYS}{IdempotencyKeyFactory(**sent).pk}/change/").text
    assert page.count("&lt;b&gt;") >= 5, (
        "path and body, in the request and in the curl command, and the error"
    )
    assert "<b>" not in page


def test_a_key_is_found_by_its_user_and_by_its_scope(staff):
    user = UserFactory(username="jane")
    key = IdempotencyKeyFactory(user=user, scope=f"user:{user.pk}")
    IdempotencyKeyFactory()
    for term in ("jane", f"user:{user.pk}"):
        assert shown(staff.get(KEYS, {"q": term})) == {key.pk}
    own = IdempotencyKeyFactory(scope="scope=account:7")
    assert shown(staff.get(KEYS, {"q": "account:7"})) == {own.pk}
