"""Fill the tables as a large site has them after an outage. One statement fills a kind of rows, so
a million keys take a minute."""

# ruff: noqa: S608 - the values are constants of this module

from django.contrib.admin.models import CHANGE
from django.contrib.contenttypes.models import ContentType
from django.db import connections

from idempotency.models import IdempotencyKey

#: The causes of the outage: the state of the keys, their stuck code, the reason as SQL, and their
#: percentage of the unfinished keys.
CAUSES = (
    ("stuck", "call_in_doubt", "'The call \"sms\" was begun, and its result is unknown.'", 32),
    ("stuck", "attempts_exhausted", "'ReadTimeout: no answer to req_' || n || 'ab12c3'", 32),
    ("stuck", "view_gave_up", "'Stripe lists no charge for ride ' || n || '.'", 14),
    ("acknowledged", "view_gave_up", "'Stripe lists no charge for ride ' || n || '.'", 8),
    ("abandoned", "", "''", 14),
)
#: The columns of each key, and their values for the row ``n``.
_SAME = {
    "idempotency_key": "gen_random_uuid()::text", "user_id": "1", "request_method": "'POST'",
    "request_path": "'/rides/' || n || '/pay'", "request_content_type": "'application/json'",
    "request_headers": "'{}'", "remote_addr": "'10.0.0.1'", "request_fingerprint": "md5(n::text)",
    "request_body": "convert_to(repeat('{\"ride\": 1}', 20), 'UTF8')",
    "seed": "decode(md5(n::text), 'hex')", "attempts": "1", "completer_attempts": "0",
    "begun": "true", "lease_seconds": "90", "retention_hours": "72", "last_error": "''",
    "claim_token": "gen_random_uuid()",
    "history": (
        "jsonb_build_array("
        "jsonb_build_object('event', 'claimed', 'detail', 'client', 'at', now()),"
        "jsonb_build_object('event', 'recovery point', 'detail', 'charged', 'at', now()))"
    ),
}  # fmt: skip
_YEARS = "now() - n * interval '1 second'"
_RECENT = "now() - interval '10 minutes' - (%d - n) * interval '10 milliseconds'"


def fill_keys(
    finished: int, unfinished: int = 0, refused: int = 0, *, using: str = "default"
) -> None:
    """Insert so many keys. A fifth of the finished keys have the scope ``user:1``. The unfinished
    keys have the CAUSES, in that order."""
    over = {
        "scope": "'user:' || CASE WHEN n % 5 = 0 THEN 1 ELSE n % 1000 END", "created_at": _YEARS,
        "last_run_at": _YEARS, "stuck_code": "''", "stuck_reason": "''",
        "expires_at": "now() + interval '9 hours'",
    }  # fmt: skip
    response = {
        "recovery_point": "'finished'", "finished_at": _YEARS, "response_code": "201",
        "response_headers": "'{}'",
        "response_body": "convert_to(repeat('{\"ok\": 1}', 20), 'UTF8')",
    }  # fmt: skip
    _insert(over | response, finished, using)
    _insert(over | {"recovery_point": "'started'", "refused_at": _YEARS}, refused, using)
    for state, code, reason, percentage in CAUSES:
        count = unfinished * percentage // 100
        at = _RECENT % count
        stuck_at = at if code else "NULL"
        values = {
            "scope": "'user:' || n % 1000", "created_at": at, "last_run_at": at,
            "recovery_point": "'charged'", "stuck_at": stuck_at, "stuck_code": f"'{code}'",
            "stuck_reason": reason,
            "acknowledged_at": "now()" if state == "acknowledged" else "NULL",
        }  # fmt: skip
        _insert(values, count, using)
    with connections[using].cursor() as cursor:
        cursor.execute(f"ANALYZE {IdempotencyKey._meta.db_table}")


def _insert(values: dict[str, str], count: int, using: str) -> None:
    columns = _SAME | values
    with connections[using].cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {IdempotencyKey._meta.db_table} ({', '.join(columns)})"
            f" SELECT {', '.join(columns.values())}"
            f" FROM generate_series(1, {count}) AS n"
        )


def fill_jobs(waiting: int, failed: int, *, using: str = "default") -> None:
    """Insert so many staged jobs: waiting ones of which half are due, and failed ones of one
    cause."""
    with connections[using].cursor() as cursor:
        for count, run_at, failed_at, error in (
            (waiting, f"now() + (n - {waiting // 2}) * interval '1 minute'", "NULL", "''"),
            (
                failed,
                "now()",
                "now() - n * interval '1 second'",
                "'OSError: mail ' || n || ' down'",
            ),
        ):
            cursor.execute(
                "INSERT INTO idempotency_stagedjob (id, job_name, job_args, queue, run_at,"
                " hand_overs, refusals, failed_at, last_error) SELECT gen_random_uuid(),"
                f" 'shop.jobs.mail', '{{}}', 'default', {run_at}, 0, 0, {failed_at}, {error}"
                f" FROM generate_series(1, {count}) AS n"
            )
        cursor.execute("ANALYZE idempotency_stagedjob")


def fill_log(user_id: int, count: int, *, using: str = "default") -> None:
    """Insert entries of the admin log: the person has acted on the ``count`` keys with the smallest
    ids."""
    content_type = ContentType.objects.db_manager(using).get_for_model(IdempotencyKey)
    with connections[using].cursor() as cursor:
        cursor.execute(
            "INSERT INTO django_admin_log (action_time, user_id, content_type_id, object_id,"
            " object_repr, action_flag, change_message) SELECT now(), %s, %s, id::text, '', %s, ''"
            " FROM idempotency_idempotencykey ORDER BY id LIMIT %s",
            [user_id, content_type.pk, CHANGE, count],
        )
        cursor.execute("ANALYZE django_admin_log")
