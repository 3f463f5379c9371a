"""Protected views in the tests of a project: inside the transaction of ``TestCase``, and with real
transactions."""

from typing import Any
from unittest.mock import patch

import pytest
from django.contrib.auth import get_user_model
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import TestCase, TransactionTestCase, override_settings
from django.urls import path

from idempotency.jobs import stage_job
from idempotency.models import IdempotencyKey, StagedJob
from tests.factories import UserFactory
from tests.kit.views import create, phased, plain, two_phases
from tests.models import Entry


def _broken(request: HttpRequest) -> HttpResponse:
    create(request)
    raise RuntimeError("out of luck")


def _spend(request: HttpRequest) -> HttpResponse:
    stage_job("tests.kit.jobs.anything", {})
    return create(request)


#: The databases whose hooks were called.
called: list[str] = []


def _write_in_both(request: HttpRequest) -> HttpResponse:
    Entry.objects.using("shard_b").create(name="there")
    transaction.on_commit(lambda: called.append("shard_b"), using="shard_b")
    return create(request)


urlpatterns = [
    path("plain/", plain(_spend)),
    path("strict/", plain(_spend, isolation="serializable")),
    path("phased/", two_phases(create, lambda request: HttpResponse(b"done", status=201))),
    path("both/", plain(_write_in_both)),
    path("plain-error/", plain(_broken)),
    path("phased-error/", phased(_broken)),
    path("plain-refusal/", plain(lambda request: (create(request), HttpResponse(status=429))[1])),
]


class InUsersTests:
    """Tests for both kinds of test case."""

    def setUp(self) -> None:
        """Sign in."""
        self.client.raise_request_exception = False
        self.client.force_login(UserFactory())

    def post(self, name: str, key: str = "key-1", **data: Any) -> HttpResponse:
        """Send one request."""
        return self.client.post(
            f"/{name}/", data, content_type="application/json", headers={"Idempotency-Key": key}
        )

    def test_runs_once_and_replays(self) -> None:
        for name in ("plain", "strict", "phased"):
            with self.subTest(name):
                before = Entry.objects.count()
                first, second = self.post(name, key=name), self.post(name, key=name)
                assert (first.status_code, second.status_code) == (201, 201)
                assert second.content == first.content
                assert "Idempotent-Replayed" not in first
                assert second["Idempotent-Replayed"] == "true"
                assert Entry.objects.count() == before + 1

    def test_mismatch(self) -> None:
        for name in ("plain", "phased"):
            with self.subTest(name):
                self.post(name, key=name)
                assert self.post(name, key=name, a=1).status_code == 422

    def test_error_is_rolled_back(self) -> None:
        for name in ("plain-error", "phased-error"):
            with self.subTest(name):
                assert self.post(name, key=name).status_code == 500
                assert not Entry.objects.exists()
                assert self.post(name, key=name).status_code == 500

    def test_answer_that_is_not_stored_is_rolled_back(self) -> None:
        assert self.post("plain-refusal").status_code == 429
        assert not Entry.objects.exists()
        assert not IdempotencyKey.objects.exists()
        assert get_user_model().objects.count() == 1

    def test_jobs_are_staged(self) -> None:
        self.post("plain")
        self.post("plain")
        assert StagedJob.objects.count() == 1


@override_settings(ROOT_URLCONF=__name__)
class InTestCase(InUsersTests, TestCase):
    """Inside the transaction of ``TestCase``."""

    def test_transaction_opened_by_the_test_is_an_outer_one(self) -> None:
        """A plain view is a savepoint of it, whatever its isolation. Django's
        ``atomic(durable=True)`` refuses it too."""
        with transaction.atomic():
            assert self.post("plain").status_code == 201
            assert self.post("strict", key="key-2").status_code == 201
            assert self.post("phased", key="key-3").status_code == 500
            transaction.set_rollback(True)
        assert not Entry.objects.exists()
        assert not IdempotencyKey.objects.exists()


@pytest.mark.postgres
@override_settings(ROOT_URLCONF=__name__)
class InTestCaseWithTwoDatabases(TestCase):
    """A test case with a second database that has ATOMIC_REQUESTS."""

    databases = ("default", "shard_b")

    def test_hooks_stay_with_their_database(self) -> None:
        self.client.force_login(UserFactory())
        headers = {"Idempotency-Key": "key-1"}
        with (
            patch.dict(connections.settings["shard_b"], ATOMIC_REQUESTS=True),
            self.captureOnCommitCallbacks(using="shard_b", execute=True),
        ):
            assert self.client.post("/both/", headers=headers).status_code == 201
        assert called == ["shard_b"]


@override_settings(ROOT_URLCONF=__name__)
class InTransactionTestCase(InUsersTests, TransactionTestCase):
    """With real transactions."""
