"""What must hold in each project: requests, jobs, loops and pages."""

import gzip
import json
import os
import threading
import uuid
from datetime import timedelta
from typing import Any
from unittest import SkipTest

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.db.models import F
from django.test import Client, TransactionTestCase, override_settings

from idempotency.completer import complete_once
from idempotency.enqueuer import enqueue_once
from idempotency.exceptions import KeyReused, Rejected, Unfinished
from idempotency.models import IdempotencyKey, StagedJob
from idempotency.reaper import reap_once
from tests.configurations.projects import LACKS
from tests.configurations.shop import operations, views
from tests.configurations.shop.models import Elsewhere, Order

GZIP = os.environ.get("CONFIGURATION_GZIP") == "1"
WAIT_SECONDS = 30
LACKING = {
    what: reason
    for name in os.environ["CONFIGURATION"].split("+")
    for what, reason in LACKS.get(name, {}).items()
}
PLAIN = [
    url
    for url in ("/plain/", "/method/", "/async/", "/drf/", "/ninja/orders")
    if url.strip("/") not in LACKING
]
PHASED = [] if "phased" in LACKING else ["/phased/", "/drf-phased/"]
#: Views whose own framework refuses a request without a user; the others redirect it to the login
#: page.
REFUSING = ("/async/", "/drf/", "/drf-phased/", "/ninja/orders")


def needs(what: str) -> None:
    """Skip a test of something that this configuration lacks."""
    if what in LACKING:
        raise SkipTest(LACKING[what])


@override_settings(DEBUG=os.environ.get("CONFIGURATION_DEBUG") == "1")
class Contract(TransactionTestCase):
    """A signed-in client, and the rows that its requests leave."""

    databases = "__all__"

    def setUp(self) -> None:
        """Sign a client in."""
        views.EVENTS.clear()
        views.CALLS.clear()
        self.user = get_user_model().objects.create_superuser("jane", "jane@example.com", "secret")
        self.client = self.signed_in()

    def tearDown(self) -> None:
        """Close the connections of this thread, as the end of a request may."""
        connections.close_all()

    def signed_in(self) -> Client:
        """Return another client of the same user."""
        client = Client(raise_request_exception=False)
        client.force_login(self.user)
        return client

    def send(
        self,
        url: str,
        key: str = "key-1",
        name: str = "tea",
        client: Client | None = None,
        **extra: Any,
    ) -> Any:
        """Send one request."""
        body = json.dumps({"name": name}).encode()
        headers = {"Idempotency-Key": key} | extra.pop("headers", {})
        if GZIP:
            body, headers = gzip.compress(body), headers | {"Content-Encoding": "gzip"}
        return (client or self.client).post(
            url, body, content_type="application/json", headers=headers, **extra
        )

    def later(self, **fields: timedelta) -> None:
        """Make all keys older."""
        IdempotencyKey.objects.update(**{name: F(name) - by for name, by in fields.items()})

    def abandon(self) -> None:
        """Make the client of the only key silent, so that the completer may run it."""
        while_ago = timedelta(minutes=20)
        self.later(created_at=while_ago, last_run_at=while_ago, locked_until=while_ago)

    def test_first_request_and_replay(self) -> None:
        """A retry gets the same response, and the work is done once."""
        for number, url in enumerate((*PLAIN, *PHASED)):
            with self.subTest(url):
                first = self.send(url, f"key-{number}", f"tea {number}")
                self.assertIn(first.status_code, (200, 201), first.content)
                self.assertEqual(first.json()["user"], str(self.user.pk))
                self.assertNotIn("Idempotent-Replayed", first)
                again = self.send(url, f"key-{number}", f"tea {number}")
                self.assertEqual(
                    (again.status_code, again.content), (first.status_code, first.content)
                )
                self.assertEqual(again["Idempotent-Replayed"], "true")
                self.assertEqual(Order.objects.filter(name=f"tea {number}").count(), 1)
                self.assertEqual(self.send(url, f"key-{number}", "coffee").status_code, 422)
                stranger = self.send(url, f"key-{number}", f"tea {number}", Client())
                self.assertEqual(stranger.status_code // 100, 4 if url in REFUSING else 3)

    def test_error_is_rolled_back_and_the_retry_runs(self) -> None:
        """An exception leaves nothing of a plain view."""

        def fail() -> None:
            raise RuntimeError("out of luck")

        for number, url in enumerate(PLAIN):
            with self.subTest(url):
                views.EVENTS["after write"] = fail
                self.assertEqual(self.send(url, f"key-{number}", f"tea {number}").status_code, 500)
                self.assertFalse(Order.objects.filter(name=f"tea {number}").exists())
                views.EVENTS.clear()
                self.assertIn(
                    self.send(url, f"key-{number}", f"tea {number}").status_code, (200, 201)
                )

    def test_serialization_failure_is_retried_in_the_request(self) -> None:
        """The client sees nothing of a failure that another attempt repairs."""
        needs("retries")

        def conflict() -> None:
            views.EVENTS.clear()
            with connection.cursor() as cursor:
                cursor.execute(
                    "DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$"
                )

        for number, url in enumerate((*PLAIN, *PHASED)):
            with self.subTest(url):
                views.EVENTS["after write"] = conflict
                self.assertIn(
                    self.send(url, f"key-{number}", f"tea {number}").status_code, (200, 201)
                )
                self.assertEqual(Order.objects.filter(name=f"tea {number}").count(), 1)

    def test_unique_violation_is_an_error_of_the_view(self) -> None:
        """A bug of the view is answered 500, and changes nothing."""
        Order.objects.create(name="tea")
        self.assertEqual(self.send("/plain/").status_code, 500)
        self.assertFalse(IdempotencyKey.objects.exists())

    def test_duplicate_in_flight(self) -> None:
        """A duplicate gets 409 while the first request runs."""
        reached, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            views.EVENTS.clear()
            reached.set()
            go_on.wait(WAIT_SECONDS)

        answers = []

        def first() -> None:
            try:
                answers.append(self.send("/plain/", client=self.signed_in()))
            finally:
                connections.close_all()

        views.EVENTS["after write"] = wait
        thread = threading.Thread(target=first)
        thread.start()
        try:
            self.assertTrue(reached.wait(WAIT_SECONDS))
            self.assertEqual(self.send("/plain/", client=self.signed_in()).status_code, 409)
        finally:
            go_on.set()
            thread.join(WAIT_SECONDS)
        self.assertEqual(answers[0].status_code, 201, answers[0].content)
        self.assertEqual(self.send("/plain/").content, answers[0].content)
        self.assertEqual(Order.objects.count(), 1)

    def test_retry_resumes_a_phased_view(self) -> None:
        """A retry continues after the last commit, with the same downstream key."""
        needs("phased")
        for number, url in enumerate(PHASED):
            with self.subTest(url):
                views.CALLS.clear()
                views.EVENTS["after call"] = lambda: 1 / 0
                self.assertEqual(self.send(url, f"key-{number}", f"tea {number}").status_code, 500)
                views.EVENTS.clear()
                answer = self.send(url, f"key-{number}", f"tea {number}")
                self.assertEqual(answer.status_code, 201, answer.content)
                self.assertEqual(len(views.CALLS), 2)
                self.assertEqual(len(set(views.CALLS)), 1)
                self.assertEqual(Order.objects.filter(name=f"tea {number}").count(), 1)

    def test_completer_finishes(self) -> None:
        """The completer runs an abandoned request as its user; the client then gets the
        response."""
        needs("phased")
        for number, url in enumerate(PHASED):
            with self.subTest(url):
                views.EVENTS["after call"] = lambda: 1 / 0
                self.assertEqual(self.send(url, f"key-{number}", f"tea {number}").status_code, 500)
                views.EVENTS.clear()
                self.abandon()
                self.assertEqual(
                    complete_once().finished,
                    1,
                    IdempotencyKey.objects.values("last_error", "stuck_reason"),
                )
                answer = self.send(url, f"key-{number}", f"tea {number}")
                self.assertEqual((answer.status_code, answer["Idempotent-Replayed"]), (201, "true"))
                self.assertEqual(answer.json()["user"], str(self.user.pk))

    def test_takeover_stops_the_late_run(self) -> None:
        """A run whose lease has ended commits nothing after another run took over."""
        needs("phased")

        def take_over() -> None:
            views.EVENTS.clear()
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(WAIT_SECONDS)

        def other() -> None:
            try:
                self.later(locked_until=timedelta(hours=1))
                answers.append(self.send("/phased/", client=self.signed_in()))
            finally:
                connections.close_all()

        answers: list[Any] = []
        views.EVENTS["before call"] = take_over
        late = self.send("/phased/")
        self.assertEqual([answers[0].status_code, late.status_code], [201, 201])
        self.assertEqual(late.content, answers[0].content)
        self.assertEqual((Order.objects.count(), StagedJob.objects.count()), (1, 1))

    def test_job_is_handed_over_once(self) -> None:
        """A staged job has one effect."""
        needs("phased")
        self.assertEqual(self.send("/phased/").status_code, 201)
        self.assertEqual(StagedJob.objects.count(), 1)
        self.assertEqual(enqueue_once().handed_over, 1)
        self.assertEqual(Order.objects.filter(name="receipt of tea").count(), 1)
        self.assertFalse(StagedJob.objects.exists())

    def test_operation_runs_once(self) -> None:
        """A repeat gets the same result, and the work is done once."""
        for _ in range(2):
            self.assertTrue(operations.sell.once("key-1", name="tea")["order"])
            self.assertEqual(operations.order.once("key-1", name="coffee"), {"charge": 1})
            with self.assertRaises(Rejected):
                operations.sell.once("key-2", name="poison")
        with self.assertRaises(KeyReused):
            operations.sell.once("key-1", name="milk")
        names = ["booked coffee", "coffee", "poison", "tea"]
        self.assertEqual(sorted(Order.objects.values_list("name", flat=True)), names)
        self.assertEqual(len(views.CALLS), 1)
        self.assertFalse(connection.in_atomic_block)

    def test_operation_is_a_savepoint(self) -> None:
        """An operation in an open transaction is rolled back with it."""
        with transaction.atomic():
            operations.sell.once("key-1", name="tea")
            transaction.set_rollback(True)
        self.assertFalse(Order.objects.exists())
        self.assertTrue(operations.sell.once("key-1", name="tea"))

    def test_operation_is_finished_by_the_completer(self) -> None:
        """The completer continues after the last commit, with the same downstream key."""
        views.EVENTS["after call"] = lambda: 1 / 0
        with self.assertRaises(Unfinished):
            operations.order.once("key-1", name="tea")
        views.EVENTS.clear()
        self.abandon()
        self.assertEqual(complete_once().finished, 1, IdempotencyKey.objects.values("last_error"))
        self.assertEqual(operations.order.once("key-1", name="tea"), {"charge": 1})
        self.assertEqual(len(views.CALLS), 2)
        self.assertEqual(Order.objects.filter(name="tea").count(), 1)

    def test_serialization_failure_of_an_operation_is_retried(self) -> None:
        """The transaction is repeated, and the call is not."""
        needs("retries")

        def conflict() -> None:
            views.EVENTS.clear()
            with connection.cursor() as cursor:
                cursor.execute(
                    "DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$"
                )

        for name in ("sell", "order"):
            with self.subTest(name):
                views.EVENTS["after write"] = conflict
                getattr(operations, name).once("key-1", name=name)
                self.assertEqual(Order.objects.filter(name=name).count(), 1)
        self.assertEqual(len(views.CALLS), 1)

    def test_message_is_processed_once(self) -> None:
        """A second delivery does nothing."""
        self.assertEqual([self.send("/webhook/").content for _ in range(2)], [b"first", b"again"])
        self.assertEqual(Order.objects.count(), 1)

    def test_both_databases(self) -> None:
        """A view that writes to two databases writes to both, once; or to neither."""
        self.assertEqual(self.send("/both/").status_code, 201)
        self.assertEqual(self.send("/both/")["Idempotent-Replayed"], "true")
        self.assertEqual((Order.objects.count(), Elsewhere.objects.count()), (1, 1))
        if settings.DATABASES.get("other", {}).get("ATOMIC_REQUESTS"):
            views.EVENTS["after write"] = lambda: 1 / 0
            self.assertEqual(self.send("/both/", "key-2", "coffee").status_code, 500)
            self.assertEqual((Order.objects.count(), Elsewhere.objects.count()), (1, 1))

    def test_form(self) -> None:
        """A form that is sent twice is taken once."""
        page = self.client.get("/form/")
        self.assertEqual(page.status_code, 200)
        content = (
            gzip.decompress(page.content)
            if page.get("Content-Encoding") == "gzip"
            else page.content
        )
        key = content.decode().partition('name="idempotency_key" value="')[2].partition('"')[0]
        self.assertTrue(key)
        answers = [
            self.client.post("/form/", {"idempotency_key": key, "name": "tea"}) for _ in range(2)
        ]
        self.assertEqual(
            [(answer.status_code, answer["Location"]) for answer in answers],
            [(302, "/thanks/")] * 2,
        )
        self.assertEqual(Order.objects.count(), 1)

    def test_upload(self) -> None:
        """An upload is a request like others."""
        for _ in range(2):
            file = SimpleUploadedFile("a.txt", b"x" * 5000)
            answer = self.client.post(
                "/upload/", {"name": "tea", "file": file}, headers={"Idempotency-Key": "key-1"}
            )
            self.assertEqual((answer.status_code, answer.content), (201, b"5000"))
        self.assertEqual(Order.objects.count(), 1)

    def test_reaper_deletes(self) -> None:
        """The reaper deletes finished keys after their retention, and the key may be used again."""
        self.assertEqual(self.send("/plain/").status_code, 201)
        days = timedelta(days=4)
        self.later(created_at=days, finished_at=days, last_run_at=days, expires_at=days)
        self.assertEqual(reap_once().deleted, 1)
        self.assertFalse(IdempotencyKey.objects.exists())
        self.assertEqual(self.send("/plain/", name=f"tea {uuid.uuid4()}").status_code, 201)

    def test_pages_of_the_admin(self) -> None:
        """Each page is served."""
        needs("phased")
        views.EVENTS["after call"] = lambda: 1 / 0
        self.send("/phased/")
        views.EVENTS.clear()
        self.send("/phased/", "key-2", "coffee")
        pages = ["/admin/", "/admin/idempotency/idempotencykey/", "/admin/idempotency/stagedjob/"]
        pages += [
            f"/admin/idempotency/idempotencykey/{pk}/change/"
            for pk in IdempotencyKey.objects.values_list("pk", flat=True)
        ]
        for page in pages:
            with self.subTest(page):
                self.assertEqual(self.client.get(page).status_code, 200)

    def test_commands(self) -> None:
        """Each command ends without an error."""
        self.send("/plain/")
        for command in ("complete_keys", "reap_keys", "enqueue_jobs", "describe_idempotency"):
            with self.subTest(command), open(os.devnull, "w") as nowhere:
                call_command(command, stdout=nowhere, stderr=nowhere)

    def test_no_transaction_is_left_open(self) -> None:
        """A request leaves its connection in autocommit, outside of a transaction."""
        for url in (*PLAIN, *PHASED):
            self.send(url, url, url)
            self.assertTrue(connection.get_autocommit())
            self.assertFalse(connection.in_atomic_block)
