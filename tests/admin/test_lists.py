"""The lists: what they are filtered, searched and sorted by, and the file of what is listed."""

import csv
import io
import re
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from urllib.parse import parse_qsl
from uuid import uuid4

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from idempotency._text import Grouped
from idempotency.admin import export, filters
from idempotency.admin.form_filters import DAYS, FROM, TO, CreatedFilter, range_query
from idempotency.admin.keys import SAVED_VIEWS
from idempotency.admin.reading import AtLeast
from idempotency.interventions import acknowledge
from idempotency.models import IdempotencyKey, StagedJob
from idempotency.templatetags.idempotency_admin import grouped
from tests.factories import IdempotencyKeyFactory, RideFactory, StagedJobFactory, UserFactory
from tests.kit.admin import KEYS, listed, person, pks
from tests.kit.ageing import ago

JOBS = "/admin/idempotency/stagedjob/"


@pytest.fixture
def staff(db: None) -> Client:
    return person()


def stuck(reason: str = "Look.", code: str = "view_gave_up", **changes: Any) -> IdempotencyKey:
    state = {
        "stuck_at": timezone.now(),
        "stuck_code": code,
        "stuck_reason": reason,
        "claim_token": uuid4(),
    }
    return IdempotencyKeyFactory(**state | changes)


def test_stuck_keys_are_listed_with_the_oldest_first_and_others_with_the_youngest(
    staff: Client,
) -> None:
    young, old = stuck(created_at=ago(hours=1)), stuck(created_at=ago(hours=9))
    assert listed(staff, {"state": "stuck"}) == pks(old, young)
    assert listed(staff, {"state": "unfinished"}) == listed(staff, {}) == pks(young, old)
    column = {
        name: f"{number}" for number, name in enumerate(staff.get(KEYS).context["cl"].list_display)
    }["age"]
    assert listed(staff, {"state": "stuck", "o": column}) == pks(young, old)
    assert listed(staff, {"o": f"-{column}"}) == pks(old, young)
    assert re.findall(r'<th scope="col" class="sortable column-(\w+)', staff.get(KEYS).text) == [
        "age"
    ]


def test_the_list_shows_and_filters_by_the_status_of_the_response(staff: Client) -> None:
    made, gone, fault = (
        IdempotencyKeyFactory(finished=True, response_code=code) for code in (201, 410, 503)
    )
    IdempotencyKeyFactory()
    assert 'class="field-status">410</td>' in staff.get(KEYS).text
    for status, key in {"2xx": made, "4xx": gone, "5xx": fault, "410": gone, "503": fault}.items():
        assert listed(staff, {"status": status}) == pks(key), status
    for status in ("3xx", "6xx", "x", "9" * 30, "²²²", "\0"):
        assert listed(staff, {"status": status}) == []


def test_the_list_is_filtered_by_the_beginning_of_the_path(staff: Client) -> None:
    text, other = stuck(request_path="/rides/7/texts?a=1"), stuck(request_path="/carts/1")
    done = IdempotencyKeyFactory(finished=True, request_path="/rides")
    assert listed(staff, {"path": "/rides"}) == pks(done, text)
    assert listed(staff, {"path": "/rides", "state": "stuck"}) == pks(text)
    assert listed(staff, {"path": "/car", "state": "unfinished"}) == pks(other)
    assert listed(staff, {"path": "\0"}) == listed(staff, {"path": "%"}) == []
    page = staff.get(KEYS, {"path": "/rides", "state": "stuck"}).text
    assert '<input type="hidden" name="state" value="stuck">' in page


def test_a_filter_without_an_index_looks_at_the_newest_keys_only(
    staff: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "NEWEST", 2)
    old, young = (
        IdempotencyKeyFactory(finished=True, created_at=ago(hours=hours)) for hours in (3, 2)
    )
    waiting = stuck(created_at=ago(hours=9))
    IdempotencyKeyFactory(created_at=ago(hours=1), request_path="/other")
    assert listed(staff, {"status": "2xx"}) == listed(staff, {"path": "/rides"}) == pks(young)
    assert listed(staff, {"path": "/rides", "state": "stuck"}) == pks(waiting), (
        "unfinished keys have an index"
    )
    assert listed(staff, {"state": "finished"}) == pks(young, old)


def test_keys_are_filtered_by_the_group_of_their_error(staff: Client) -> None:
    same = [
        stuck(f"Stripe lists no charge for ride {ride}.", created_at=ago(hours=ride))
        for ride in (2, 1)
    ]
    stuck("Stripe is down.", last_error="Stripe lists no charge for ride 4.")
    failed = IdempotencyKeyFactory(
        last_error="Stripe lists no charge for ride 5.", created_at=ago(hours=3)
    )
    IdempotencyKeyFactory(finished=True, last_error="Stripe lists no charge for ride 6.")
    group = "Stripe lists no charge for ride #."
    assert listed(staff, {"error_group": group, "state": "stuck"}) == pks(*same)
    assert listed(staff, {"error_group": group}) == pks(*reversed(same), failed)
    assert listed(staff, {"error_group": "Stripe lists no charge for ride 1."}) == []
    links = re.findall(
        r'href="([^"]+error_group=[^"]+)" title', staff.get(KEYS, {"state": "stuck"}).text
    )
    assert len(links) == 3
    linked = staff.get(links[0].replace("&amp;", "&")).context["cl"].result_list
    assert pks(*linked) == pks(*same)


def test_failed_jobs_are_filtered_by_the_group_of_their_error(staff: Client) -> None:
    job = StagedJobFactory(failed_at=timezone.now(), last_error="OSError: no route to 10.0.0.1")
    StagedJobFactory(failed_at=timezone.now(), last_error="ValueError: 1")
    StagedJobFactory(last_error="OSError: no route to 10.0.0.1")
    assert listed(staff, {"error_group": "OSError: no route to #.#.#.#"}, JOBS) == pks(job)


def test_a_group_is_listed_with_the_job_that_holds_it(staff: Client) -> None:
    head, held = (
        StagedJobFactory(group="account:7", group_position=position) for position in (3, 4)
    )
    StagedJobFactory(group="other", group_position=1)
    StagedJobFactory()
    StagedJob.objects.filter(pk=head.pk).update(failed_at=timezone.now())
    assert sorted(listed(staff, {"group": "account:7"}, JOBS)) == sorted(pks(held, head))
    assert listed(staff, {"state": "held"}, JOBS) == pks(held)
    page = staff.get(JOBS, {"state": "held"}).text
    assert "waits for an earlier job of its group" in page
    assert 'href="?group=account%3A7"' in page
    assert "account:7" in staff.get(f"{JOBS}{held.pk}/change/").text


def test_a_job_that_the_broker_has_does_not_wait(staff: Client) -> None:
    sent, _ = StagedJobFactory(last_error="NotDeleted: trigger"), StagedJobFactory()
    assert listed(staff, {"state": "not_deleted"}, JOBS) == pks(sent)
    page = staff.get(JOBS, {"state": "not_deleted"}).text
    assert 'class="field-state">sent, but cannot be deleted<' in page


@pytest.mark.parametrize(
    "term",
    [
        "Order-77",
        "Order-7",
        "Orde",
        "jane",
        "jane@example.com",
        "JANE@example.com",
        "user:{} Order-77",
    ],
)
def test_a_key_is_found_by_what_a_person_has_at_hand(term: str, staff: Client) -> None:
    user = UserFactory(username="jane")
    term = term.format(user.pk)
    key = IdempotencyKeyFactory(
        finished=True, idempotency_key="Order-77", user=user, scope=f"user:{user.pk}"
    )
    IdempotencyKeyFactory(finished=True, idempotency_key="order-8")
    assert listed(staff, {"q": term}) == pks(key)


@pytest.mark.parametrize(
    "term", ["Ord", "rder-77", "order-77", "jane@", "%", "@", "Orde%", "_rder"]
)
def test_a_search_for_less_finds_nothing(term: str, staff: Client) -> None:
    user = UserFactory(username="jane")
    IdempotencyKeyFactory(idempotency_key="Order-77", user=user, scope=f"user:{user.pk}")
    assert listed(staff, {"q": term}) == []


def test_the_beginning_of_a_key_finds_the_unfinished_and_the_newest(
    staff: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idempotency.admin.search.NEWEST", 1)
    old = IdempotencyKeyFactory(finished=True, idempotency_key="order-1", created_at=ago(hours=9))
    waiting = IdempotencyKeyFactory(idempotency_key="order-2", created_at=ago(hours=8))
    young = IdempotencyKeyFactory(finished=True, idempotency_key="order-3")
    assert listed(staff, {"q": "order"}) == pks(young, waiting)
    assert listed(staff, {"q": "order-1"}) == pks(old), "a whole key is found at any age"


@pytest.mark.postgres
@pytest.mark.parametrize("scope", ["user:7", "pay:user:7"])
def test_a_scope_and_a_key_read_only_their_entries_of_the_index(staff: Client, scope: str) -> None:
    key = IdempotencyKeyFactory(finished=True, idempotency_key="Order-77", scope=scope)
    IdempotencyKeyFactory(finished=True, idempotency_key="Order-77", scope="user:8")
    with CaptureQueriesContext(connection) as queries:
        assert listed(staff, {"q": f"{scope} Order-77"}) == pks(key)
    searches = [query["sql"] for query in queries if "'Order-77'" in query["sql"]]
    assert len(searches) == 1
    assert '"scope" IN (' in searches[0]


def test_a_key_is_found_by_its_job(staff: Client) -> None:
    key = IdempotencyKeyFactory()
    job = StagedJobFactory(idempotency_key=key)
    other = StagedJobFactory()
    assert listed(staff, {"q": str(job.pk)}) == pks(key)
    assert listed(staff, {"q": str(other.pk)}) == []
    assert listed(person("view_idempotencykey"), {"q": str(job.pk)}) == []


def test_a_key_is_found_by_what_the_pages_of_linked_rows_are_searched_by(staff: Client) -> None:
    key = IdempotencyKeyFactory()
    RideFactory(idempotency_key=key, stripe_charge_id="ch_one")
    RideFactory(stripe_charge_id="ch_other")
    assert listed(staff, {"q": "ch_one"}) == pks(key)
    assert listed(person("view_idempotencykey"), {"q": "ch_one"}) == [], (
        "who may not see rides finds none by them"
    )
    assert listed(person("view_idempotencykey", "view_ride"), {"q": "ch_one"}) == pks(key)


def test_each_saved_view_is_a_link_to_what_its_name_says(staff: Client) -> None:
    doubtful, other = stuck(code="call_in_doubt"), stuck(created_at=ago(hours=1))
    mine = stuck(code="my_own", created_at=ago(hours=2))
    url = f"{KEYS}bulk/acknowledge/?ids={mine.pk}"
    (work,) = re.findall(r'name="work" value="([^"]+)"', staff.get(url).text)
    progress = staff.post(url, {"work": work})["Location"]
    assert staff.post(progress, {"step": "continue"}).status_code == 302
    assert acknowledge(other.pk, other.claim_token, by="jane")
    found = {label: listed(staff, query) for label, query in SAVED_VIEWS}
    assert found == {"Oldest stuck": pks(doubtful), "In doubt": pks(doubtful), "Mine": pks(mine)}
    page = staff.get(KEYS).text
    assert all(f">{label}</a>" in page for label in found)
    assert listed(person(), {"mine": "1"}) == []


def table(client: Client, query: dict[str, str]) -> list[dict[str, str]]:
    answer = client.get(f"{KEYS}csv/", query)
    assert (answer.status_code, answer["Content-Type"]) == (200, "text/csv; charset=utf-8")
    return list(csv.DictReader(io.StringIO(answer.content.decode())))


def test_the_file_has_what_is_listed_and_no_body(staff: Client) -> None:
    old = stuck('Look, "there".\nAnd here.', created_at=ago(hours=2), request_body=b"secret-body")
    young = stuck(request_path="/carts")
    IdempotencyKeyFactory(finished=True, response_body=b"secret-body")
    rows = table(staff, {"state": "stuck"})
    assert [int(row["id"]) for row in rows] == pks(old, young)
    assert rows[0]["stuck_reason"] == 'Look, "there".\nAnd here.'
    assert [row["state"] for row in rows] == ["stuck", "stuck"]
    assert [row["request_path"] for row in table(staff, {"path": "/carts"})] == ["/carts"]
    link = re.findall(r'href="([^"]+/csv/[^"]*)"', staff.get(KEYS, {"state": "stuck"}).text)
    assert link == [f"{KEYS}csv/?state=stuck"]
    assert "secret-body" not in staff.get(f"{KEYS}csv/").content.decode()


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1", " =1", '"=1']
)
def test_no_cell_of_the_file_is_a_formula(text: str, staff: Client) -> None:
    stuck(text, idempotency_key=text, scope=text, request_path=text, last_error=text)
    row = table(staff, {})[0]
    for column in ("stuck_reason", "idempotency_key", "scope", "request_path", "last_error"):
        assert row[column].startswith("'")


@pytest.mark.parametrize("separator", [";", ";;", "; ", ';"', "|", "\t", "\n", ","])
def test_no_part_of_a_cell_is_a_formula_for_a_program_with_another_separator(
    separator: str, staff: Client
) -> None:
    """A spreadsheet in a language with a decimal comma separates cells by semicolons."""
    stuck(f"one{separator}=1+1", request_path="/rides?a;=2;b=-1")
    row = table(staff, {})[0]
    assert not any(
        part.strip(' "').startswith("=") for part in re.split(r"[;,|\t\n]", row["stuck_reason"])
    )
    assert row["request_path"] == "/rides?a;'=2;b=-1"


def test_long_texts_are_cut_in_lists_and_files(staff: Client) -> None:
    path = f"/rides?{'a' * 7_700}"
    key = stuck("b" * 1_500, request_path=path)
    row = table(staff, {})[0]
    assert (len(row["request_path"]), len(row["stuck_reason"])) == (
        export.MAX_CHARACTERS,
        export.MAX_CHARACTERS,
    )
    assert (row["request_path"][:50], row["request_path"][-1]) == (path[:50], "…")
    assert all(
        "a" * 300 not in staff.get(f"{KEYS}{page}").text
        for page in ("", "dashboard/", "bulk/hand_back/")
    )
    assert path in staff.get(f"{KEYS}{key.pk}/change/").text


def test_the_file_says_that_there_is_more(staff: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_ROWS", 2)
    IdempotencyKeyFactory.create_batch(2)
    assert len(table(staff, {})) == 2
    IdempotencyKeyFactory()
    rows = table(staff, {})
    assert len(rows) == 3
    assert not rows[-1]["created_at"]


def test_the_file_needs_the_permission_to_view(db: None) -> None:
    assert person("view_stagedjob", "view_bodies").get(f"{KEYS}csv/").status_code == 403
    assert person("view_idempotencykey", "view_bodies").get(f"{KEYS}csv/").status_code == 200


@pytest.mark.parametrize(
    "query", [{"p": "\0"}, {"state": "x"}, {"path": "\0"}, {"seed__gte": "1"}, {"q": "\0"}]
)
def test_no_query_of_a_file_or_an_action_is_an_error_of_the_server(
    query: dict[str, str], staff: Client
) -> None:
    for page in ("csv/", "bulk/hand_back/"):
        assert staff.get(f"{KEYS}{page}", query).status_code in (200, 302, 400)


def test_keys_are_filtered_by_their_creation_time(staff: Client, settings: Any) -> None:
    settings.TIME_ZONE = "Europe/Berlin"
    early, late = (
        IdempotencyKeyFactory(
            finished=True, created_at=datetime(2026, 10, 25, hour, 30, tzinfo=UTC)
        )
        for hour in (0, 2)
    )
    assert listed(staff, {FROM: "2026-10-25T03:00"}) == pks(late), "in the zone of the person"
    assert listed(staff, {FROM: "2026-10-25T02:00", TO: "2026-10-25T03:00"}) == pks(early)
    assert listed(staff, {TO: "2026-10-25T02:00:00Z"}) == pks(early)
    for text in ("yesterday", "2026-13-01T00:00", "0001-01-01T00:00", "\0"):
        assert staff.get(KEYS, {FROM: text})["Location"].endswith("?e=1"), text


def test_links_lead_from_a_day_to_its_hours_and_to_the_steps_of_an_hour(
    staff: Client, settings: Any
) -> None:
    """The day of the test has a change of the clock, so it has 25 hours."""
    settings.TIME_ZONE = "Europe/Berlin"
    day = datetime(2026, 10, 24, 22, tzinfo=UTC)
    key = IdempotencyKeyFactory(created_at=day + timedelta(hours=7, minutes=33))

    def steps(query: dict[str, str]) -> list[dict[str, Any]]:
        (filtered,) = [
            spec
            for spec in staff.get(KEYS, query | {"state": "unfinished"}).context["cl"].filter_specs
            if isinstance(spec, CreatedFilter)
        ]
        form = next(iter(filtered.choices(staff.get(KEYS, query).context["cl"])))
        return list(form["links"])[DAYS:]

    assert steps({}) == []
    hours = steps(range_query(day, day + timedelta(hours=25)))
    assert (len(hours), len({link["url"] for link in hours})) == (25, 25)
    minutes = steps(dict(parse_qsl(hours[7]["url"].removeprefix("?"))))
    assert [link["label"] for link in minutes][:2] == ["06:00", "06:05"]
    assert listed(staff, dict(parse_qsl(minutes[6]["url"].removeprefix("?")))) == pks(key)
    assert listed(staff, dict(parse_qsl(minutes[5]["url"].removeprefix("?")))) == []
    page = staff.get(KEYS, {"state": "unfinished"}).text
    assert f'name="{FROM}"' in page
    assert re.search(r'href="\?[^"]*created_from[^"]*state=unfinished', page)


def test_jobs_are_filtered_by_name_and_queue_and_by_the_error_of_their_row(staff: Client) -> None:
    failed = {"failed_at": timezone.now(), "last_error": "OSError: no route to 10.0.0.1"}
    job = StagedJobFactory(job_name="app.jobs.one", queue="mail", **failed)
    StagedJobFactory(job_name="app.jobs.two", queue="slow")
    assert listed(staff, {"job_name": "app.jobs.one"}, JOBS) == pks(job)
    assert listed(staff, {"queue": "mail"}, JOBS) == pks(job)
    page = staff.get(JOBS).text
    assert all(f'<input type="text" name="{name}"' in page for name in ("job_name", "queue"))
    assert 'href="?queue=slow"' in page
    (link,) = re.findall(r'href="(\?state=failed&amp;error_group=[^"]+)"', page)
    assert pks(*staff.get(f"{JOBS}{unescape(link)}").context["cl"].result_list) == pks(job)


def test_a_phone_gets_the_label_of_each_cell_and_numbers_have_separators(staff: Client) -> None:
    key = stuck("<b>", attempts=7)
    page = staff.get(KEYS).text
    assert re.findall(r'<td data-label="([^"]+)" class="field-attempts">7<', page) == ["Attempts"]
    assert 'data-label="Stuck because, last error"' in page
    assert f'<th class="field-id"><a href="{KEYS}{key.pk}/change/' in page
    assert str(Grouped(20_000)) == f"{grouped(20_000)}" == "20,000"
    assert str(AtLeast(5_000)) == "5,000+"


def test_arguments_of_jobs_are_shown_as_json(staff: Client) -> None:
    StagedJobFactory(failed_at=timezone.now(), job_args={"on": None, "late": True})
    page = unescape(staff.get(f"{JOBS}bulk/discard/?state=failed").text)
    assert '{"on": null, "late": true}' in page
    assert 'class="idem-danger"' in page
