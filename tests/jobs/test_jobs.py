"""Staging a job: with its transaction, or not at all."""

from datetime import datetime, timedelta

import pytest
from django.db import transaction
from django.db.models.functions import Now
from django.http import HttpResponse
from django.utils import timezone

from idempotency._engine.phased_run import current_key
from idempotency.exceptions import NoOpenTransaction
from idempotency.jobs import call_job, stage_job
from idempotency.models import StagedJob
from tests.factories import IdempotencyKeyFactory
from tests.kit.views import both_kinds

JOB = "tests.kit.jobs.record"


@pytest.mark.django_db(transaction=True)
def test_a_job_commits_with_its_transaction():
    with transaction.atomic():
        job = stage_job(JOB, {"order": 1})
    kept = StagedJob.objects.get()
    assert (kept.pk, kept.job_name, kept.job_args, kept.queue) == (
        job.pk,
        JOB,
        {"order": 1},
        "default",
    )
    assert kept.idempotency_key is None
    assert StagedJob.objects.filter(run_at__lte=Now()).exists(), "it is due at once"


@pytest.mark.django_db(transaction=True)
def test_a_job_vanishes_with_its_transaction():
    with transaction.atomic():
        stage_job(JOB)
        transaction.set_rollback(True)
    assert not StagedJob.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_outside_a_transaction_nothing_is_staged():
    with pytest.raises(NoOpenTransaction, match="outside a transaction"):
        stage_job(JOB)
    assert not StagedJob.objects.exists()


@pytest.mark.django_db
def test_a_list_is_positional_and_the_queue_and_the_time_are_kept():
    later = timezone.now() + timedelta(hours=1)
    with transaction.atomic():
        job = stage_job(JOB, [1, "two", None], queue="mail", run_at=later)
    job.refresh_from_db()
    assert (job.job_args, job.queue, job.run_at) == ([1, "two", None], "mail", later)


@pytest.mark.django_db
def test_a_job_points_at_the_key_whose_request_is_under_way():
    key = IdempotencyKeyFactory()
    token = current_key.set(key)
    try:
        with transaction.atomic():
            stage_job(JOB)
    finally:
        current_key.reset(token)
    assert StagedJob.objects.get().idempotency_key == key


@pytest.mark.django_db(transaction=True)
@both_kinds
def test_a_job_that_is_staged_after_a_request_points_at_no_key(kind, serve, sender):
    serve(view=kind(lambda request: HttpResponse()))
    assert sender.send().status_code == 200
    with transaction.atomic():
        stage_job(JOB)
    assert StagedJob.objects.get().idempotency_key is None


@pytest.mark.django_db
def test_ids_are_ordered_by_time():
    with transaction.atomic():
        jobs = [stage_job(JOB) for _ in range(20)]
    milliseconds = [job.pk.int >> 80 for job in jobs]
    assert milliseconds == sorted(milliseconds)
    assert {job.pk.version for job in jobs} == {7}


@pytest.mark.django_db
@pytest.mark.parametrize(
    "name",
    [
        "",
        "send",
        "shop.jobs.",
        "shop jobs.send",
        ".send",
        "a." + "b" * 254,
        stage_job,
        None,
        "a\0.b",
    ],
)
def test_what_is_no_dotted_path_is_refused(name):
    with pytest.raises(ValueError, match="dotted path"):
        stage_job(name)


@pytest.mark.django_db
@pytest.mark.parametrize("queue", ["", "q" * 101, "a\0b", None])
def test_a_queue_without_a_usable_name_is_refused(queue):
    with pytest.raises(ValueError, match="queue"):
        stage_job(JOB, queue=queue)


@pytest.mark.django_db
def test_arguments_that_are_too_long_are_refused(settings):
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "MAX_JOB_BYTES": 1000}
    stage_job(JOB, {"text": "x" * 900})
    for args in ({"text": "x" * 1000}, ["ä" * 300, "ä" * 300]):
        with pytest.raises(ValueError, match="MAX_JOB_BYTES"):
            stage_job(JOB, args)
    assert StagedJob.objects.count() == 1


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"when": datetime(2026, 1, 1)}, "'when'.*datetime"),
        ([1, object()], "1 of .*object"),
        ({"price": float("nan")}, "'price'"),
        ({"name": "a\0b"}, "'name'.*NUL"),
        ({"name": "\ud800"}, "'name'.*surrogates"),
        ({1: "x"}, "named 1"),
        ({"lines": [({17: 3, "17": 4},)]}, "'lines'.*not a string"),
        ("text", "not str"),
        ((1, 2), "not tuple"),
    ],
)
def test_an_argument_that_is_not_json_is_named(args, problem):
    with pytest.raises(TypeError, match=problem):
        stage_job(JOB, args)
    assert not StagedJob.objects.exists()


@pytest.mark.django_db
def test_a_backslash_before_u0000_is_no_nul():
    with transaction.atomic():
        job = stage_job(JOB, {"text": "\\u0000"})
    job.refresh_from_db()
    assert job.job_args == {"text": "\\u0000"}


@pytest.mark.django_db
def test_a_time_without_a_zone_is_refused():
    with pytest.raises(ValueError, match="time zone"):
        stage_job(JOB, run_at=datetime(2026, 1, 1))


@pytest.mark.parametrize(
    "name", ["tests.kit.jobs.yielding", "tests.kit.jobs.yielding_in_a_coroutine"]
)
def test_a_generator_function_fails_in_place_of_doing_nothing(name):
    with pytest.raises(TypeError, match=f"{name} is a generator function"):
        call_job(name, [1])
