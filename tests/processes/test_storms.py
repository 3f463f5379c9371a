"""Storms of requests from many clients under few keys: each key has one effect and one answer."""

from collections.abc import Callable
from functools import partial
from threading import Event
from typing import Any

import pytest
from django.db import connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from pytest_django import Settings

from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.reaper import reap_once
from tests.kit.ageing import make_older
from tests.kit.chance import chance
from tests.kit.serving import Sender, another_client
from tests.kit.threads import all_at_once, at_once, background
from tests.kit.views import create, phased, plain, two_phases
from tests.kit.waiting import eventually
from tests.models import Entry

pytestmark = [pytest.mark.postgres, pytest.mark.processes, pytest.mark.django_db(transaction=True)]

Serve = Callable[..., None]


def test_a_storm_of_plain_requests_with_rollbacks_and_mismatches(
    serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        if request.headers.get("X-Chance") == "fail":
            return HttpResponse(status=503)
        Entry.objects.create(name=request.headers["Idempotency-Key"])
        return HttpResponse(request.body, status=201)

    serve(
        view=idempotent(work),
        strict=idempotent(isolation="serializable")(work),
        again=idempotent(isolation="repeatable read")(work),
    )
    seen: dict[str, set[bytes]] = {}
    urls = {f"key-{number}": ["/view/", "/strict/", "/again/"][number % 3] for number in range(15)}

    def client(number: int) -> list[tuple[str, int]]:
        own, drawn = another_client(sender), chance(number)
        out = []
        for key in [key for key in urls for _ in range(4)]:
            headers = {"X-Chance": "fail" if drawn.random() < 0.4 else "go"}
            answer = own.send(
                urls[key],
                key=key,
                body={"other": True} if number == 7 else {"a": 1},
                headers=headers,
            )
            if answer.status_code == 201:
                seen.setdefault(key, set()).add(answer.content)
            out.append((key, answer.status_code))
        return out

    answers = [answer for of_client in all_at_once(client, 8) for answer in of_client]
    assert {status for _, status in answers} <= {201, 409, 422, 503}, {
        status for _, status in answers
    }
    for key, url in urls.items():
        last = [sender.send(url, key=key, body=body) for body in ({"a": 1}, {"other": True})]
        assert sorted(answer.status_code for answer in last) == [201, 422]
        stored = {answer.content for answer in last if answer.status_code == 201}
        assert seen.get(key, stored) == stored
    names = [entry.name for entry in Entry.objects.all()]
    assert len(names) == len(set(names))
    assert set(names) == set(urls)


def test_a_storm_over_expired_keys_with_reapers(serve: Serve, sender: Sender) -> None:
    serve(view=idempotent(create), phased=phased(create))
    for number in range(20):
        for url in ("/view/", "/phased/"):
            assert sender.send(url, key=f"{url}{number}").status_code == 201
    make_older(80 * 3600, "created_at", "finished_at")
    before = Entry.objects.count()

    def client(number: int) -> set[int]:
        own = another_client(sender)
        out = set()
        for turn in range(20):
            for url in ("/view/", "/phased/"):
                out.add(own.send(url, key=f"{url}{turn}").status_code)
        return out

    def reaper() -> set[int]:
        for _ in range(10):
            reap_once(batch_size=5)
        return set()

    seen = set().union(*at_once([partial(client, number) for number in range(5)] + [reaper]))
    assert seen <= {201, 409}, seen
    assert Entry.objects.count() == before + 40


@pytest.mark.parametrize("kind", ["plain", "serializable", "phased"])
def test_a_storm_in_which_the_database_ends_connections(
    kind: str, serve: Serve, sender: Sender, settings: Settings
) -> None:
    """Whatever a connection was doing when it ended, each key has one effect and one answer."""

    def entry_of_key(request: HttpRequest) -> HttpResponse:
        return JsonResponse(
            {"id": Entry.objects.get(idempotency_key=request.idempotency_key).pk}, status=201
        )

    def client(number: int) -> dict[str, bytes]:
        own, drawn = another_client(sender), chance(number)

        def sent_until_done(key: str) -> Any:
            return eventually(lambda: (answer := own.send(key=key)).status_code == 201 and answer)

        return {key: sent_until_done(key).content for key in drawn.sample(keys, len(keys))}

    def end_connections() -> int:
        ended, drawn = 0, chance("victims")
        with connection.cursor() as cursor:
            while not done.wait(0.02):
                cursor.execute(
                    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <>"
                    " pg_backend_pid() AND backend_type = 'client backend' ORDER BY pid"
                )
                if pids := [pid for (pid,) in cursor.fetchall()]:
                    cursor.execute("SELECT pg_terminate_backend(%s)", [drawn.choice(pids)])
                    ended += 1
        return ended

    views = {
        "plain": plain(create),
        "serializable": plain(create, isolation="serializable"),
        "phased": two_phases(create, entry_of_key),
    }
    settings.IDEMPOTENCY = {"LOCK_TIMEOUT_SECONDS": 2}
    serve(view=views[kind])
    keys, done = [f"key-{number}" for number in range(60)], Event()
    with background(end_connections) as ending:
        try:
            answers = all_at_once(client, 5)
        finally:
            done.set()
    connection.close()
    assert all(answer == answers[0] for answer in answers)
    assert Entry.objects.count() == IdempotencyKey.objects.finished().count() == 60
    assert ending.result() > 10


def test_storm_of_both_kinds(serve: Serve, sender: Sender, settings: Settings) -> None:
    """A rolling deploy: some processes run the view as a plain one, some as a phased one."""
    releases = {"old": idempotent(create), "new": phased(create)}
    serve(view=lambda request: releases[request.headers["X-Release"]](request))

    def client(number: int) -> set[int]:
        own, drawn = another_client(sender), chance(number)
        sent = [(f"key-{turn // 3}", drawn.choice(list(releases))) for turn in range(60)]
        return {
            own.send(key=key, headers={"X-Release": release}).status_code for key, release in sent
        }

    seen = set().union(*all_at_once(client, 8))
    assert seen <= {201, 409, 503}
    assert Entry.objects.count() == IdempotencyKey.objects.finished().count() == 20
    assert IdempotencyKey.objects.stuck().count() == 0, (
        IdempotencyKey.objects.stuck().values("stuck_code").first()
    )
