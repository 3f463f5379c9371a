"""The message of a staged job for a broker without workers of its own, and its run in a consumer.

A message is a JSON object with ``job_id``, ``job_name``, ``job_args``, ``using`` and ``trace``.
"""

import json

from django.db import close_old_connections

from idempotency._async import in_own_context
from idempotency._hidden import Hidden
from idempotency._job_run import job_run
from idempotency.jobs import call_job, shard_of, trace_of
from idempotency.models import StagedJob


def message_of(job: StagedJob) -> Hidden[bytes]:
    """Return the message of a job."""
    ids = {"job_id": str(job.id), "job_name": job.job_name, "job_args": job.job_args}
    return Hidden(json.dumps(ids | {"using": shard_of(job), "trace": trace_of(job)}).encode())


@in_own_context
def run_message(message: Hidden[bytes] | Hidden[str]) -> None:
    """Run the job of a message once. On return its effects are committed.

    If the job raises, its effects are rolled back. The function also raises if the message is
    not that of a staged job.
    """
    close_old_connections()
    try:
        job = Hidden(json.loads(message.value))
        name, using = job.value["job_name"], job.value["using"]
        with job_run(name, job.value["job_id"], using, job.value.get("trace")) as first:
            if first:
                call_job(name, job.value["job_args"], using=using)
    finally:
        close_old_connections()
