"""The pages for keys of operations: the lists, the page of a key, and its buttons."""

import html
import json
from typing import Any

import pytest
from django.db.models.functions import Now
from django.test import Client

from idempotency._operations import definition
from idempotency.exceptions import WAITS_FOR_DEPLOY, InterventionRequired, Rejected, Unfinished
from idempotency.models import IdempotencyKey
from tests.factories import IdempotencyKeyFactory, UserFactory
from tests.kit.admin import KEYS
from tests.kit.ageing import lock_end
from tests.operations import Bank, charge, note, pay, pay_without_undo, tell

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def bank(monkeypatch: pytest.MonkeyPatch) -> Bank:
    from tests import operations

    new = Bank()
    monkeypatch.setattr(operations, "bank", new)
    return new


@pytest.fixture
def staff(client: Client) -> Client:
    client.force_login(UserFactory(username="jane", is_staff=True, is_superuser=True))
    return client


def the_key() -> IdempotencyKey:
    return IdempotencyKey.objects.get()


def stuck() -> IdempotencyKey:
    with pytest.raises(InterventionRequired):
        pay_without_undo.once("key", name="one", cents=402)
    return the_key()


def unfinished(bank: Bank, operation: Any = charge) -> IdempotencyKey:
    def broken() -> None:
        raise OSError("no route")

    bank.after = broken
    with pytest.raises(Unfinished):
        operation.once("key", name="one", cents=900)
    bank.after = lambda: None
    return the_key()


def page(client: Client, key: IdempotencyKey) -> Any:
    return client.get(f"{KEYS}{key.pk}/change/")


def text_of(response: Any) -> str:
    return html.unescape(response.text)


def press(client: Client, key: IdempotencyKey, name: str, **data: str) -> Any:
    """Press a button of the page, with the data that the page showed."""
    query = page(client, key).context["looked_at"]
    url = f"{KEYS}{key.pk}/press/{name}/?{query}"
    form = client.get(url).context["form"]
    return client.post(url, {"seen": form["seen"].value()} | data)


# The lists.


def test_a_list_names_the_operation_and_its_end(staff: Client) -> None:
    note.once("key", name="one")
    with pytest.raises(Rejected):
        note.once("other", name="two", fails="returns")
    listed = staff.get(KEYS)
    rows = listed.context["cl"].result_list
    admin = listed.context["cl"].model_admin
    assert [admin.request_line(key) for key in rows] == ["operation tests.note"] * 2
    assert [admin.status(key) for key in rows] == ["rejected", "result"]
    assert "call operation" not in listed.text


def test_a_filter_chooses_an_operation(staff: Client, bank: Bank) -> None:
    note.once("key", name="one")
    charge.once("key", name="one", cents=9)
    request = IdempotencyKeyFactory(request_path="tests.note")
    listed = staff.get(KEYS, {"operation": "tests.note"})
    (key,) = listed.context["cl"].result_list
    assert key.request_path == "tests.note"
    assert key.pk != request.pk
    assert "?operation=tests.pay_without_undo" in listed.text
    assert not staff.get(KEYS, {"operation": "nope"}).context["cl"].result_list
    both = staff.get(KEYS, {"operation": "tests.note", "state": "unfinished"})
    assert not both.context["cl"].result_list


@pytest.mark.parametrize("term", ["tests.note", "tests.note:user:7", "jane", "user:{}", "chosen"])
def test_the_search_finds_keys_of_operations(staff: Client, term: str) -> None:
    user = UserFactory._meta.model.objects.get()
    note.by(user if term != "tests.note:user:7" else type(user)(pk=7)).once("chosen", name="one")
    IdempotencyKeyFactory()
    found = staff.get(KEYS, {"q": term.format(user.pk)}).context["cl"].result_list
    assert [key.request_path for key in found] == ["tests.note"]


def test_the_dashboard_groups_stuck_keys_by_operation(staff: Client) -> None:
    key = stuck()
    dashboard = staff.get(f"{KEYS}dashboard/")
    ((group, link),) = dashboard.context["groups"]
    assert group.place == "operation tests.pay_without_undo"
    assert list(staff.get(KEYS + link).context["cl"].result_list) == [key]


# The page of a key.


def test_a_finished_operation_shows_its_arguments_and_its_result(staff: Client, bank: Bank) -> None:
    charge.once("key", name="one", cents=9)
    shown = page(staff, the_key())
    assert shown.context["heading"] == "Finished: result stored"
    text = text_of(shown)
    assert '{\n  "cents": 9,\n  "name": "one"\n}' in text
    assert '{\n  "transfer": 0\n}' in text
    for part in ("curl", "Headers", "Remote address", "status 200", "call operation", "Body"):
        assert part not in text
    assert [stop.name for stop in shown.context["line"]] == ["started", "finished"]


def test_a_rejected_operation_shows_its_refusal(staff: Client) -> None:
    with pytest.raises(Rejected):
        note.once("key", name="one", fails="returns")
    shown = page(staff, the_key())
    assert shown.context["heading"] == "Finished: rejected, refused"
    assert 'Rejected: refused, It was refused.\n{\n  "name": "one"\n}' in text_of(shown)


@pytest.mark.parametrize("result", [None, "text", 3, False])
def test_each_kind_of_result_is_shown_as_json(staff: Client, result: Any) -> None:
    note.once("key", name="one")
    IdempotencyKey.objects.update(response_body=json.dumps(result).encode())
    shown = page(staff, the_key())
    fields = shown.context["adminform"].model_admin
    assert f">{json.dumps(result)}</pre>" in text_of(shown), fields


def test_an_unfinished_operation_shows_its_points_its_calls_and_its_state(
    staff: Client, bank: Bank
) -> None:
    shown = page(staff, unfinished(bank, pay))
    assert [(stop.name, stop.place) for stop in shown.context["line"]] == [
        ("started", "passed"),
        ("booked", "here"),
        ("finished", "ahead"),
    ]
    assert shown.context["last_call"]["name"] == "transfer"
    assert "transfer" in str(shown.context["timeline"])
    assert "A retry continues it at once." in shown.context["next_step"]
    assert "running code" not in shown.context["next_step"]


def test_the_value_of_a_call_that_is_made_at_most_once_is_shown(staff: Client, bank: Bank) -> None:
    tell.once("key", name="one", cents=1)
    ((linked,),) = [kind.rows for kind in page(staff, the_key()).context["linked"]]
    assert linked.name == "told"
    assert 'result {"told": 0}' in linked.state


def test_an_operation_that_the_code_does_not_have_is_named(
    staff: Client, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = unfinished(bank)
    monkeypatch.delitem(definition._operations, "tests.charge")
    assert "does not have the operation" in page(staff, key).context["next_step"]


@pytest.mark.parametrize("code", WAITS_FOR_DEPLOY)
def test_a_key_that_waits_for_a_deploy_says_so(staff: Client, bank: Bank, code: str) -> None:
    key = unfinished(bank)
    IdempotencyKey.objects.update(stuck_at=Now(), stuck_code=code, stuck_reason="Look.")
    shown = page(staff, key)
    assert "When a deploy has ended this cause" in shown.context["next_step"]
    assert shown.context["best"] == "complete"


# The buttons.


def test_a_result_is_previewed_and_then_stored(staff: Client) -> None:
    key = stuck()
    answer = {"kind": "result", "body": '{"transfer": 17}', "code": "", "message": ""}
    asked = press(staff, key, "answer", step="preview", **answer)
    assert asked.context["preview"].body == '{\n  "transfer": 17\n}'
    assert "Date" not in asked.text
    previewed = asked.context["form"].digest()
    other = answer | {"body": '{"transfer": 18}'}
    press(staff, key, "answer", step="store", previewed=previewed, **other)
    assert the_key().finished_at is None, "only what was previewed is stored"
    press(staff, key, "answer", step="store", previewed=previewed, note="ticket 7", **answer)
    assert pay_without_undo.once("key", name="one", cents=402) == {"transfer": 17}
    assert the_key().history[-1]["detail"] == "result, by jane: ticket 7"
    log = staff.get(f"{KEYS}{key.pk}/history/")
    assert "Answered with a result. ticket 7" in log.text


def test_a_refusal_is_stored(staff: Client) -> None:
    key = stuck()
    answer = {"kind": "rejected", "code": "returned", "message": "The bank.", "body": "[1]"}
    asked = press(staff, key, "answer", step="preview", **answer)
    assert asked.context["preview"].status == "Rejected: returned, The bank."
    previewed = asked.context["form"].digest()
    press(staff, key, "answer", step="store", previewed=previewed, **answer)
    with pytest.raises(Rejected) as caught:
        pay_without_undo.once("key", name="one", cents=402)
    assert caught.value.args == ("returned", "The bank.", [1])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"body": "{"}, "body"),
        ({"kind": "rejected"}, "code"),
        ({"code": "declined"}, "kind"),
        ({"body": "[" * 100_000}, "body"),
        ({"body": "NaN"}, "body"),
    ],
)
def test_a_mistake_in_an_answer_is_shown(
    staff: Client, changes: dict[str, str], field: str
) -> None:
    answer = {"kind": "result", "body": "", "code": "", "message": ""} | changes
    asked = press(staff, stuck(), "answer", step="preview", **answer)
    assert list(asked.context["form"].errors) == [field]
    assert asked.context["preview"] is None


def test_an_answer_that_is_too_large_is_refused(staff: Client, settings: Any) -> None:
    key = stuck()
    settings.IDEMPOTENCY = {"MAX_STORED_BODY_BYTES": 10}
    answer = {"kind": "result", "body": '"%s"' % ("x" * 11), "code": "", "message": ""}
    asked = press(staff, key, "answer", step="preview", **answer)
    assert "at most 10 are stored" in str(asked.context["form"].non_field_errors())


def test_the_other_buttons_work(staff: Client, bank: Bank) -> None:
    key = unfinished(bank)
    press(staff, key, "complete")
    assert charge.once("key", name="one", cents=900) == {"transfer": 0}
    assert the_key().history[-1]["detail"] == "result"
    key.delete()
    press(staff, stuck(), "acknowledge")
    assert IdempotencyKey.objects.acknowledged().exists()
    IdempotencyKey.objects.update(locked_until=lock_end())
    press(staff, the_key(), "release")
    assert the_key().locked_until is None


def test_a_confirmation_shows_the_arguments(staff: Client, bank: Bank) -> None:
    key = unfinished(bank)
    query = page(staff, key).context["looked_at"]
    asked = staff.get(f"{KEYS}{key.pk}/press/complete/?{query}")
    assert '"cents": 900' in text_of(asked)
    assert "operation tests.charge" in asked.text
