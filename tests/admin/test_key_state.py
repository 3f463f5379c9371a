"""The state of the key in the admin of another model."""

from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext

from idempotency.contrib.admin import KeyStateMixin
from idempotency.models import IdempotencyKey
from rides_demo.models import Ride
from tests.factories import IdempotencyKeyFactory, RideFactory, UserFactory
from tests.kit.ageing import ago
from tests.models import Account, Entry

pytestmark = pytest.mark.django_db

RIDES = "/admin/rides_demo/ride/"


def viewer(*codenames: str) -> Client:
    user = UserFactory(is_staff=True)
    user.user_permissions.add(*Permission.objects.filter(codename__in=codenames))
    client = Client()
    client.force_login(user)
    return client


def stuck_ride() -> Ride:
    stuck = {"stuck_at": ago(minutes=9), "stuck_code": "view_gave_up", "stuck_reason": "Look."}
    return RideFactory(idempotency_key=IdempotencyKeyFactory(**stuck))


def test_a_row_shows_the_state_of_its_key_in_the_list_and_on_its_page() -> None:
    ride, _other = stuck_ride(), RideFactory()
    client = viewer("view_ride", "view_idempotencykey")
    for url in (RIDES, f"{RIDES}{ride.pk}/change/"):
        text = client.get(url).text
        assert text.count("stuck for 9 min") == 1
        assert f"/admin/idempotency/idempotencykey/{ride.idempotency_key_id}/change/" in text


def test_who_may_not_view_keys_sees_the_state_without_a_link() -> None:
    stuck_ride()
    text = viewer("view_ride").get(RIDES).text
    assert "stuck for 9 min" in text
    assert "/admin/idempotency/" not in text


def test_a_list_takes_one_query_more_however_many_rows_it_has() -> None:
    client, counts = viewer("view_ride"), []
    for count in (1, 9):
        for _ in range(count):
            stuck_ride()
        with CaptureQueriesContext(connection) as queries:
            client.get(RIDES)
        counts.append(len(queries))
        assert (
            len([query for query in queries if 'FROM "idempotency_idempotencykey"' in query["sql"]])
            == 1
        )
    assert counts[0] == counts[1]


class EntryAdmin(KeyStateMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ("id", "name", "key_state")
    list_editable = ("name",)


def asked(row_admin: Any, model: type, **data: Any) -> tuple[Any, Any]:
    request = RequestFactory().get("/", data)
    request.user = UserFactory(is_staff=True, is_superuser=True)
    return row_admin(model, admin.site), request


def test_a_list_with_editable_columns_keeps_its_rows() -> None:
    Entry.objects.create(name="a", idempotency_key=IdempotencyKeyFactory(finished=True))
    entry_admin, request = asked(EntryAdmin, Entry)
    changelist = entry_admin.get_changelist_instance(request)
    formset = entry_admin.get_changelist_formset(request)(queryset=changelist.result_list)
    assert "finished" in entry_admin.key_state(formset.forms[0].instance)


def test_a_key_that_is_gone_has_no_state() -> None:
    entry = Entry(name="a", idempotency_key_id=987654)
    entry._state.db = "default"
    entry_admin, request = asked(EntryAdmin, Entry)
    entry_admin._read_states(request, [entry])
    assert entry_admin.key_state(entry) == ""
    assert IdempotencyKey.objects.count() == 0


@pytest.mark.parametrize(("model", "name"), [(Account, ""), (Entry, "other")])
def test_a_model_without_one_foreign_key_to_keys_is_a_mistake(model: type, name: str) -> None:
    entry_admin, request = asked(type("Wrong", (EntryAdmin,), {"key_field": name}), model)
    with pytest.raises(ImproperlyConfigured, match="key_field"):
        entry_admin._read_states(request, [])
