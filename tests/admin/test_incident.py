"""The walk of an incident with stuck keys of three causes, from the login to the last decision:
docs/incidents.md."""

import re
from html import unescape
from typing import Any

import pytest
from django.db import connection
from django.test import Client

from idempotency import _bulk_work
from idempotency.models import BulkWork, IdempotencyKey
from tests.factories import UserFactory
from tests.kit.admin import KEYS
from tests.kit.stuck_keys import MANY, stuck_keys

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

CAUSES = ("attempts_exhausted", "call_in_doubt", "view_gave_up")
CLICKS = 12


class Visitor:
    """A person who follows links and sends forms, and counts both."""

    def __init__(self) -> None:
        self.client, self.clicks = Client(), 0
        self.page: Any = None

    def sign_in(self) -> None:
        user = UserFactory(is_staff=True, is_superuser=True)
        user.set_password("secret")
        user.save()
        sent = {"username": user.get_username(), "password": "secret", "next": "/admin/"}
        self._note(self.client.post("/admin/login/", sent, follow=True))

    def click(self, text: str, containing: str = "") -> None:
        """Follow the link with this text, whose URL contains a text."""
        found = re.findall(r'<a [^>]*href="([^"]*)"[^>]*>([^<]*)<', self.page.text)
        urls = [unescape(url) for url, label in found if unescape(label).strip() == text]
        url = next(url for url in urls if containing in url)
        self._note(self.client.get(url, follow=True))

    def send(self, **values: Any) -> None:
        """Send the form of the page with these values."""
        request = self.page.request
        hidden = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', self.page.text)
        sent = {name: unescape(value) for name, value in hidden} | values
        url = f"{request['PATH_INFO']}?{request['QUERY_STRING']}"
        self._note(self.client.post(url, sent, follow=True))

    def _note(self, page: Any) -> None:
        assert page.status_code == 200
        self.page, self.clicks = page, self.clicks + 1


def let_there_be(count: int) -> None:
    """Let there be so many stuck keys of each cause."""
    for code in CAUSES:
        IdempotencyKey.objects.filter(stuck_code="template").delete()
        (key,) = stuck_keys(1, stuck_code="template", idempotency_key=f"{code}-0")
        columns = [field.column for field in IdempotencyKey._meta.concrete_fields]
        names = [name for name in columns if name not in ("id", "idempotency_key", "claim_token")]
        with connection.cursor() as cursor:
            cursor.execute(
                MANY.format(", ".join(names)).replace("bulk-", f"{code}-") + FROM, [count + 1]
            )
        IdempotencyKey.objects.exclude(pk=key.pk).filter(stuck_code="template").update(
            stuck_code=code, stuck_reason=f"The reason of {code}."
        )
    IdempotencyKey.objects.filter(stuck_code="template").delete()


FROM = " WHERE stuck_code = 'template'"


def groups(visitor: Visitor) -> dict[str, int]:
    return {group.cause: group.count for group, _ in visitor.page.context["groups"]}


def walk(count: int) -> Visitor:
    """Decide about all keys of three causes; each number on the way is true."""
    let_there_be(count)
    visitor = Visitor()
    visitor.sign_in()
    visitor.click("Dashboard")
    assert groups(visitor) == dict.fromkeys(CAUSES, count)
    assert visitor.page.context["unfinished"] == IdempotencyKey.objects.count() == 3 * count

    visitor.click("Hand back to the completer …", "attempts_exhausted")
    assert visitor.page.context["eligible"] == count
    visitor.send(note="ticket 7")
    assert visitor.page.context["work"].expected == count

    visitor.click("Dashboard")
    visitor.click("Answer …", "call_in_doubt")
    body = '{"detail": "Key {key.id}: your order was not placed. Use a new key."}'
    visitor.send(status=410, kind="json", body=body, note="ticket 7", step="preview")
    assert len(visitor.page.context["answers"]) == min(count, 20)
    answer = {"status": 410, "kind": "json", "body": body, "note": "ticket 7", "step": "store"}
    visitor.send(**answer)
    assert visitor.page.context["work"].expected == count

    visitor.click("Dashboard")
    visitor.click("Acknowledge …", "view_gave_up")
    visitor.send(note="ticket 7")
    visitor.click("Dashboard")
    assert [line.work.expected for line in visitor.page.context["works"]] == [count] * 3
    return visitor


def test_an_incident_of_three_causes_is_settled_with_the_clicks_that_the_docs_name() -> None:
    visitor = walk(250)
    assert visitor.clicks == CLICKS
    while _bulk_work.work_off("default"):
        pass
    visitor.page = visitor.client.get(f"{KEYS}dashboard/")
    works = visitor.page.context["works"]
    assert {line.work.action: (line.work.done, line.work.unchanged) for line in works} == {
        action: (250, {}) for action in ("hand_back", "answer", "acknowledge")
    }
    assert groups(visitor) == {}
    keys = IdempotencyKey.objects
    assert keys.acknowledged().count() == keys.finished().count() == 250
    assert keys.exclude(handed_back_at=None).count() == 250
    assert not BulkWork.objects.filter(finished_at=None).exists()
