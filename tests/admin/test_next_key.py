"""One key after the other: from the first page of the admin to the first decision, and on to the
next key of the same list."""

import re
from html import unescape
from typing import Any
from uuid import uuid4

import pytest
from django.db.models.functions import Now
from django.test import Client

from idempotency.models import IdempotencyKey
from tests.factories import IdempotencyKeyFactory, UserFactory
from tests.kit.admin import KEYS, person
from tests.kit.ageing import ago

pytestmark = pytest.mark.django_db(transaction=True)

NEXT = f"{KEYS}next/"


def stuck_keys(*codes: str, **changes: Any) -> list[IdempotencyKey]:
    """Return stuck keys, the oldest first."""
    return [
        IdempotencyKeyFactory(
            claim_token=uuid4(),
            **{"created_at": ago(hours=9 - number), "stuck_at": Now()} | changes,
            stuck_code=code,
            stuck_reason="Look.",
        )
        for number, code in enumerate(codes)
    ]


def links(page: Any) -> dict[str, str]:
    """Return the links of a page by their text."""
    found = re.findall(r'<a [^>]*href="([^"]*)"[^>]*>([^<]*)<', page.text)
    return {unescape(text).strip(): unescape(url) for url, text in found}


def shown(page: Any) -> IdempotencyKey:
    return page.context["original"]


def acknowledge(client: Client, page: Any) -> Any:
    """Press *Acknowledge* on the page of a key, and confirm; return the page that follows."""
    url = links(page)["Acknowledge …"]
    seen = re.findall(r'name="(\w+)" value="([^"]*)"', client.get(url).text)
    return client.post(url, {**dict(seen), "note": ""}, follow=True)


def test_five_clicks_lead_from_the_login_to_the_first_decision() -> None:
    oldest, _ = stuck_keys("view_gave_up", "view_gave_up")
    client = Client()
    user = UserFactory(is_staff=True, is_superuser=True)
    user.set_password("secret")
    user.save()
    sent = {"username": user.get_username(), "password": "secret", "next": "/admin/"}
    first_page = client.post("/admin/login/", sent, follow=True)  # 1: Log in
    dashboard = client.get(links(first_page)["Dashboard"], follow=True)  # 2
    key_page = client.get(links(dashboard)["One by one …"], follow=True)  # 3
    assert shown(key_page) == oldest
    acknowledge(client, key_page)  # 4 and 5: the button and its confirmation
    assert IdempotencyKey.objects.acknowledged().get() == oldest


def test_each_decision_leads_to_the_next_key_of_the_same_list() -> None:
    first, _, second = stuck_keys("view_gave_up", "hung", "view_gave_up")
    client, filters = person(), {"state": "stuck", "stuck_code": "view_gave_up"}
    page = client.get(NEXT, filters, follow=True)
    assert shown(page) == first
    page = acknowledge(client, page)
    assert shown(page) == second
    assert f"#{first.pk}</a>: " in page.text, "the message names the key of the action"
    page = acknowledge(client, page)
    assert [row.pk for row in page.context["cl"].result_list] == []
    assert {key.stuck_code for key in IdempotencyKey.objects.stuck()} == {"hung"}


def test_a_key_can_be_passed_over_and_keys_of_one_moment_are_all_reached() -> None:
    moment = ago(hours=1)
    keys = stuck_keys(*["hung"] * 3, created_at=moment)
    for state, order in (("stuck", keys), ("unfinished", keys[::-1])):
        client, reached = person(), []
        page = client.get(NEXT, {"state": state}, follow=True)
        while "original" in page.context:
            reached.append(shown(page))
            page = client.get(links(page)["Next key of the list"], follow=True)
        assert reached == order


def test_a_key_that_is_deleted_meanwhile_leads_to_the_first_of_the_list() -> None:
    (key,) = stuck_keys("hung")
    page = person().get(NEXT, {"state": "stuck", "after": key.pk + 1}, follow=True)
    assert shown(page) == key


def test_a_page_that_was_not_opened_from_a_list_stays() -> None:
    (key,) = stuck_keys("hung")
    client = person()
    page = client.get(f"{KEYS}{key.pk}/change/")
    assert "Next key of the list" not in links(page)
    assert shown(acknowledge(client, page)) == key


@pytest.mark.parametrize("query", ["state=nonsense", "after=x", "after=99999999999999999999"])
def test_a_link_with_nonsense_is_no_error(query: str) -> None:
    assert person().get(f"{NEXT}?{query}", follow=True).status_code == 200


def test_the_next_key_is_for_those_who_may_view_keys() -> None:
    stuck_keys("hung")
    assert person("view_stagedjob").get(NEXT).status_code == 403


def test_the_dashboard_is_on_the_first_page_for_those_who_may_see_a_part_of_it() -> None:
    for permission, offered in (
        ("view_idempotencykey", True),
        ("view_stagedjob", True),
        ("view_processedmessage", False),
    ):
        page = person(permission).get("/admin/")
        assert ("Dashboard" in links(page)) == offered
