"""Each number on each page is the number that a plain statement counts, however many rows there
are."""

# ruff: noqa: S608 - the conditions are constants of this module

import re
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from html.parser import HTMLParser
from operator import itemgetter
from typing import Any, NamedTuple

import pytest
from django.db import connection
from django.test import Client

from idempotency import _bulk_work
from idempotency.admin.filters import NEWEST
from idempotency.admin.reading import MAX_COUNT
from idempotency.contrib.prometheus import DatabaseCollector
from idempotency.models import BulkWork, IdempotencyKey
from idempotency.monitoring.doctor import REAPER_LATE_SECONDS, diagnose
from idempotency.monitoring.heartbeats import SILENT_SECONDS
from tests.admin import filled
from tests.kit.admin import KEYS, person

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

JOBS, DASHBOARD = "/admin/idempotency/stagedjob/", f"{KEYS}dashboard/"
CALLS, MESSAGES = "/admin/idempotency/downstreamcall/", "/admin/idempotency/processedmessage/"
#: The unfinished keys of an outage: more than any list, group or confirmation reads at once.
UNFINISHED, FAILED = 20_000, 6_000

OPEN = "finished_at IS NULL AND refused_at IS NULL"
HELD = f"{OPEN} AND locked_until > statement_timestamp()"
FREE = f"{OPEN} AND coalesce(locked_until <= statement_timestamp(), true)"
DUE_AT = """greatest(created_at + interval '300 s', last_run_at + interval '60 s', next_run_at,
    locked_until + lease_seconds * interval '1.5 s')"""
DUE = f"{DUE_AT} <= statement_timestamp()"
STATES = {
    "stuck": f"{FREE} AND stuck_at IS NOT NULL AND acknowledged_at IS NULL",
    "acknowledged": f"{FREE} AND acknowledged_at IS NOT NULL",
    "abandoned": f"{FREE} AND stuck_at IS NULL AND {DUE}",
    "waiting for a retry": f"{FREE} AND stuck_at IS NULL AND NOT {DUE}",
    "in flight": HELD,
    "refused": "finished_at IS NULL AND refused_at IS NOT NULL",
    "finished": "finished_at IS NOT NULL",
}
FOR_CLIENTS = f"{STATES['stuck']} AND stuck_code = 'refused_when_rebuilt'"
FOR_REVIEW = f"{STATES['stuck']} AND stuck_code <> 'refused_when_rebuilt'"
NOT_GIVEN_UP = "(stuck_at IS NULL OR stuck_code = 'unknown_recovery_point')"
AGES = {
    "under 5 minutes": "interval '0 s' AND interval '5 min'",
    "5 minutes to an hour": "interval '5 min' AND interval '1 h'",
    "an hour to a day": "interval '1 h' AND interval '1 day'",
    "over a day": "interval '1 day' AND interval '10 years'",
}
AGED = "statement_timestamp() - {} BETWEEN {}"
KEY, JOB = "idempotency_idempotencykey", "idempotency_stagedjob"
CALL, MESSAGE = "idempotency_downstreamcall", "idempotency_processedmessage"
BEAT, ROW = "idempotency_processheartbeat", "idempotency_bulkrow"
LATEST = f"id IN (SELECT id FROM {KEY} ORDER BY created_at DESC LIMIT {NEWEST})"
WAITING = "failed_at IS NULL"
FIRST = f'(SELECT min(group_position) FROM {JOB} AS of WHERE of."group" = {JOB}."group")'
IN_TURN = f"{WAITING} AND coalesce(group_position = {FIRST}, true)"
DUE_JOBS = f"{IN_TURN} AND run_at <= statement_timestamp()"
HELD_JOBS = f"{WAITING} AND group_position > {FIRST}"
NOT_DELETED = "last_error LIKE 'NotDeleted:%'"
AN_HOUR = AGED.format("run_at", AGES["5 minutes to an hour"])
#: The rows of the outage that ``filled`` does not make.
MORE = (
    f"UPDATE {KEY} SET attempts = 1 + id % 7, completer_attempts = id % 3, hangs = id % 2",
    # Of the abandoned keys, some are in flight, some wait for a retry, some are older.
    f"UPDATE {KEY} SET locked_until = now() + interval '1 hour' WHERE {OPEN} AND id % 1000 = 7",
    f"UPDATE {KEY} SET created_at = now() WHERE stuck_at IS NULL AND {OPEN} AND id % 100 = 8",
    f"UPDATE {KEY} SET created_at = now() - interval '3 h' WHERE {OPEN} AND id % 100 = 9",
    f"UPDATE {KEY} SET created_at = now() - interval '9 days',"
    f" last_run_at = now() - interval '8 days', handed_back_at = now()"
    f" WHERE {OPEN} AND id % 500 = 10",
    f"UPDATE {KEY} SET recovery_point = 'started' WHERE {OPEN} AND id % 5 = 1",
    # Some stuck keys wait for their clients, others for a deploy.
    f"UPDATE {KEY} SET stuck_code = 'refused_when_rebuilt'"
    " WHERE stuck_code = 'attempts_exhausted' AND id % 50 = 11",
    f"UPDATE {KEY} SET stuck_code = 'unknown_recovery_point'"
    " WHERE stuck_code = 'attempts_exhausted' AND id % 50 = 12",
    f"UPDATE {KEY} SET expires_at = now() - interval '2 h' WHERE id % 40 = 3 AND NOT ({OPEN})",
    f"UPDATE {KEY} SET response_code = 402 WHERE finished_at IS NOT NULL AND id % 9 = 0",
    f"UPDATE {JOB} SET queue = 'mail', hand_overs = 3, refusals = 2 WHERE run_at > now()",
    f"UPDATE {JOB} SET job_name = 'shop.jobs.sms', last_error = 'NotDeleted: trigger' WHERE id IN"
    f" (SELECT id FROM {JOB} WHERE failed_at IS NULL ORDER BY id LIMIT 30)",
    f"""UPDATE {JOB} SET "group" = 'account:' || n % 30, group_position = n FROM (SELECT id AS of,
        row_number() OVER (ORDER BY id) AS n FROM {JOB}) AS numbered WHERE id = of AND n % 7 = 0
        AND job_name <> 'shop.jobs.sms'""",
    f"INSERT INTO {CALL} (key_id, name, token, started_at, recorded_at)"
    f" SELECT id, 'sms', gen_random_uuid(), now(), CASE WHEN id % 2 = 0 THEN now() END"
    f" FROM {KEY} WHERE id % 100 = 1",
    f"INSERT INTO {MESSAGE} (source, message_id, processed_at, hook_error)"
    " SELECT 'stripe', n, now() - n * interval '1 min', CASE WHEN n < 4 THEN 'OSError' ELSE '' END"
    " FROM generate_series(1, 90) AS n",
    "INSERT INTO idempotency_trafficcount (minute, kind, count)"
    " SELECT extract(epoch FROM now())::int / 60 - m, kind, m FROM generate_series(9, 40) AS m,"
    " (VALUES ('ran 8'), ('replayed'), ('conflict'), ('failed')) AS k (kind)",
    f"INSERT INTO {BEAT} (name, host, pid, beat_at)"
    " SELECT 'complete_keys', 'web' || n, n, now() - n * interval '1 min'"
    " FROM generate_series(0, 9) AS n",
)  # fmt: skip


class Figure(NamedTuple):
    """A number, or numbers by name, that a page shows, and the statement that counts them."""

    page: str
    what: str
    shown: Callable[[Any], Any]
    sql: str


class Tables(HTMLParser):
    """The tables of a page: the texts of the cells of each row, below the caption of its table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[tuple[str, list[str]]] = []
        self._caption, self._open = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in ("caption", "td", "th"):
            self._open = tag
        if tag == "table":
            self._caption = ""
        if tag == "tr":
            self.rows.append((self._caption.strip(), []))
        elif tag in ("td", "th"):
            self.rows[-1][1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = "" if tag == self._open else self._open

    def handle_data(self, data: str) -> None:
        if self._open == "caption":
            self._caption += data
        elif self._open:
            self.rows[-1][1][-1] += data


def number(text: str) -> int:
    """Return the first number of a text."""
    return int(re.findall(r"\d[\d,]*", text)[0].replace(",", ""))


def bars(caption: str) -> Callable[[Any], dict[str, int]]:
    """Return the bars of the table with this caption, without those of 0."""

    def shown(page: Any) -> dict[str, int]:
        rows = [cells for found, cells in Tables(page.text).rows if found == caption]
        return {cells[0].strip(): number(cells[1]) for cells in rows if number(cells[1])}

    return shown


def groups(caption: str, by: int) -> Callable[[Any], dict[str, int]]:
    """Return the numbers of the groups with this caption, added up by a column."""

    def shown(page: Any) -> dict[str, int]:
        found: Counter[str] = Counter()
        for of, cells in Tables(page.text).rows:
            if of == caption and cells[0][:1].isdigit():
                found[cells[by].strip()] += number(cells[0])
        return found

    return shown


def says(pattern: str) -> Callable[[Any], int]:
    """Return the number for ``N`` in the text of a page."""
    expression = pattern.replace("N", r"([\d,]+)")
    return lambda page: number(re.findall(expression, re.sub(r"(<[^>]*>|\s)+", " ", page.text))[0])


def traffic(column: int) -> Callable[[Any], int]:
    """Return the sum of a column of the numbers of the charts."""
    return lambda page: sum(
        number(cells[column])
        for caption, cells in Tables(page.text).rows
        if not caption and len(cells) == 7 and cells[0][:1].isdigit()
    )


def column(name: str) -> Callable[[Any], list[int]]:
    """Return the numbers in a column of a list."""
    return lambda page: [*map(int, re.findall(rf'class="field-{name}">(\d+)<', page.text))]


def field(name: str) -> Callable[[Any], int]:
    """Return the number in a field of the page of a row."""
    expression = re.compile(rf'field-{name}".*?class="readonly">(\d+)<', re.S)
    return lambda page: int(expression.findall(page.text)[0])


def results(page: Any) -> int:
    """Return the number of results of a list. It counts up to a limit, and then says so."""
    text = str(page.context["cl"].paginator.count)
    return number(text) + text.endswith("+")


def eligible(page: Any) -> int:
    return number(re.findall(r"<p><strong>([\d,]+)</strong>", page.text)[0])


def count(condition: str, table: str = KEY) -> str:
    return f"SELECT count(*) FROM {table} WHERE {condition}"


def by(name: str, condition: str, table: str = KEY) -> str:
    return f"SELECT {name}, count(*) FROM {table} WHERE {condition} GROUP BY 1"


def aged(column: str, label: str = "%s") -> str:
    """Return an expression for the span of the age of a column, as the bars name it."""
    whens = [f"WHEN {AGED.format(column, span)} THEN '{label % age}'" for age, span in AGES.items()]
    return f"CASE WHEN {column} > statement_timestamp() THEN 'not due yet' {' '.join(whens)} END"


def of_dashboard() -> Iterator[Figure]:
    names = " ".join(f"WHEN {condition} THEN '{name}'" for name, condition in STATES.items())
    at = "{} AND recovery_point = '{}'"
    stuck, failed = STATES["stuck"], "failed_at IS NOT NULL"
    age = aged("run_at", "due for %s")
    waiting = f"CASE WHEN {HELD_JOBS} THEN 'held by their group' ELSE {age} END"
    gone = f"beat_at < statement_timestamp() - interval '{SILENT_SECONDS} s'"
    for what, shown, sql in (
        ("unfinished", says("Unfinished keys: N"), count(OPEN)),
        ("states", bars("By state"), by(f"CASE {names} END", OPEN)),
        ("at started", bars("started"), by(aged("created_at"), at.format(OPEN, "started"))),
        ("at charged", bars("charged"), by(aged("created_at"), at.format(OPEN, "charged"))),
        ("causes", groups("Stuck keys, by cause", 1), by("stuck_code", stuck)),
        ("requests", groups("Stuck keys, by cause", 3), by("'POST /rides/#/pay'", stuck)),
        ("for review", says("Keys that need manual review: N,"), count(FOR_REVIEW)),
        ("for clients", says("wait for a retry of their clients: N"), count(FOR_CLIENTS)),
        ("acknowledged", says("which are not finished: N"), count(STATES["acknowledged"])),
        ("due", says("Staged jobs that are due: N,"), count(DUE_JOBS, JOB)),
        ("failed", says("Staged jobs that have failed: N"), count(failed, JOB)),
        ("kept", says("cannot be deleted: N"), count(NOT_DELETED, JOB)),
        ("waiting", bars("Waiting, by age"), by(waiting, WAITING, JOB)),
        ("failed jobs", bars("Failed, by name"), by("job_name", failed, JOB)),
        ("job groups", groups("Failed jobs, by cause", 1), by("job_name", failed, JOB)),
        ("gone", says("runs the same loop: N"), count(gone, BEAT)),
    ):
        yield Figure(DASHBOARD, what, shown, sql)
    for place, kind in enumerate(("%", "replayed", "conflict", "failed"), 1):
        sql = f"SELECT sum(count)::bigint FROM idempotency_trafficcount WHERE kind LIKE '{kind}'"
        yield Figure(DASHBOARD, f"traffic {kind}", traffic(place), sql)


LISTS = {
    KEYS: {
        "": "true",
        "state=unfinished": OPEN,
        **{f"state={name.replace(' ', '_')}": condition for name, condition in STATES.items()},
        "state=for_review": FOR_REVIEW,
        "state=due": f"{FREE} AND {NOT_GIVEN_UP} AND {DUE}",
        "stuck_code=view_gave_up": f"{OPEN} AND stuck_code = 'view_gave_up'",
        "recovery_point=started": f"{OPEN} AND recovery_point = 'started'",
        "age=older": AGED.format("created_at", AGES["over a day"]),
        "created_from=2020-01-01T00:00Z": "created_at >= '2020-01-01'",
        "status=4xx": f"response_code BETWEEN 400 AND 499 AND {LATEST}",
        "path=/rides/123": f"request_path LIKE '/rides/123%' AND {LATEST}",
        "state=stuck&path=/rides/12": f"{STATES['stuck']} AND request_path LIKE '/rides/12%'",
        "mine=1": "id IN (SELECT object_id::bigint FROM django_admin_log)",
        "error_group=Stripe+lists+no+charge+for+ride+%23.": f"{OPEN} AND stuck_reason ~ '^Stripe'",
        "state=in_flight&request_group=POST+/rides/%23/pay": HELD,
        "q=user:7": "scope = 'user:7'",
    },
    JOBS: {
        "": "true",
        "state=waiting": WAITING,
        "state=failed": "failed_at IS NOT NULL",
        "state=due": DUE_JOBS,
        "state=due&age=hour": f"{IN_TURN} AND {AN_HOUR}",
        "state=later": f"{IN_TURN} AND run_at > statement_timestamp()",
        "state=held": HELD_JOBS,
        "state=not_deleted": NOT_DELETED,
        "state=waiting&age=hour": f"{WAITING} AND {AN_HOUR}",
        "job_name=shop.jobs.sms": "job_name = 'shop.jobs.sms'",
        "queue=mail": "queue = 'mail'",
        "error_group=OSError:+mail+%23+down": "last_error LIKE 'OSError: mail % down'",
    },
    CALLS: {
        "": "true",
        "name=sms": "name = 'sms'",
        "result=unknown": f"recorded_at IS NULL AND key_id IN (SELECT id FROM {KEY} WHERE {OPEN}"
        f" ORDER BY created_at LIMIT {MAX_COUNT})",
    },
    MESSAGES: {"": "true", "hooks=failed": "hook_error <> ''", "source=stripe": "true"},
}  # fmt: skip
TABLES = {KEYS: KEY, JOBS: JOB, CALLS: CALL, MESSAGES: MESSAGE}


def of_lists() -> Iterator[Figure]:
    for page, filters in LISTS.items():
        for query, condition in filters.items():
            sql = f"SELECT least(count(*), {MAX_COUNT + 1}) FROM {TABLES[page]} WHERE {condition}"
            yield Figure(f"{page}?{query}", "results", results, sql)
    newest = "SELECT array(SELECT {} FROM {} ORDER BY {} DESC, id DESC LIMIT 50)"
    yield Figure(KEYS, "attempts", column("attempts"), newest.format("attempts", KEY, "created_at"))
    for name in ("hand_overs", "refusals"):
        yield Figure(JOBS, name, column(name), newest.format(name, JOB, "id"))


def of_a_key() -> Iterator[Figure]:
    pk = IdempotencyKey.objects.stuck().filter(attempts=3, completer_attempts=2, hangs=1)[0].pk
    page, of_it = f"{KEYS}{pk}/change/", f"FROM {KEY} WHERE id = {pk}"
    for name in ("attempts", "completer_attempts", "hangs"):
        yield Figure(page, name, field(name), f"SELECT {name} {of_it}")
    yield Figure(page, "runs", says("after N runs"), f"SELECT attempts {of_it}")
    events = f"SELECT jsonb_array_length(history) {of_it}"
    yield Figure(page, "events", lambda page: page.text.count('<li class="idem-event-'), events)


def of_bulk_work(work: BulkWork) -> Iterator[Figure]:
    """The questions about all stuck keys and all failed jobs, and a half-done work."""
    stuck, failed = STATES["stuck"], "failed_at IS NOT NULL"
    left = f"SELECT {work.expected} - (SELECT count(*) FROM {ROW} WHERE work_id = '{work.pk}')"
    since = "(SELECT created_at FROM idempotency_bulkwork)"
    done = count(f"acknowledged_at > {since} AND stuck_code = 'view_gave_up'")
    keys, jobs = f"{KEYS}bulk/hand_back/?state=stuck", f"{JOBS}bulk/retry/?state=failed"
    page = f"{KEYS}bulk/acknowledge/{work.pk}/"
    yield Figure(keys, "eligible", eligible, count(stuck))
    yield Figure(keys, "kinds", groups("", 1), by("'stuck: ' || stuck_code", stuck))
    yield Figure(jobs, "eligible", eligible, count(failed, JOB))
    yield Figure(jobs, "kinds", groups("", 1), by("job_name", failed, JOB))
    for url in (page, DASHBOARD):
        yield Figure(url, "visited", says("N of [0-9,]+"), left)
        yield Figure(url, "done", says("N keys were acknowledged"), done)


def of_monitoring() -> Iterator[Figure]:
    """The doctor and the metrics, by the names of their figures."""
    since, free = "SELECT extract(epoch FROM statement_timestamp() - min({}))", f"{FREE} AND {{}}"
    late = f"expires_at < statement_timestamp() - interval '{REAPER_LATE_SECONDS} s'"
    waited = f"greatest({DUE_AT}, handed_back_at)"
    oldest_job = f"{since.format('run_at')} FROM {JOB} WHERE {IN_TURN}"
    for page, figures in {
        "doctor": {
            "keys_unfinished": count(OPEN),
            "keys_stuck": count(STATES["stuck"]),
            "keys_stuck_by_code": by("stuck_code", STATES["stuck"]),
            "keys_acknowledged": count(STATES["acknowledged"]),
            "keys_to_reap": count(late),
            "completer_lag_seconds": (
                f"{since.format(waited)} FROM {KEY} WHERE {free.format(NOT_GIVEN_UP)}"
            ),
            "due_jobs": count(DUE_JOBS, JOB),
            "failed_jobs": count("failed_at IS NOT NULL", JOB),
            "jobs_with_failed_hooks": count("hook_error <> ''", MESSAGE),
            "oldest_job_seconds": oldest_job,
        },
        "metrics": {
            "unfinished_keys": count(OPEN),
            "stuck_keys": by("stuck_code", STATES["stuck"]),
            "oldest_unfinished_seconds": (
                f"{since.format('created_at')} FROM {KEY} WHERE {OPEN} AND {NOT_GIVEN_UP}"
            ),
            "due_jobs": count(DUE_JOBS, JOB),
            "failed_jobs": count("failed_at IS NOT NULL", JOB),
            "oldest_job_seconds": oldest_job,
        },
    }.items():
        for name, sql in figures.items():
            yield Figure(page, name, itemgetter(name), sql)


def metrics() -> dict[str, Any]:
    """Return the gauges by name: the value, or the values by label."""
    found: dict[str, Any] = {}
    for gauge in DatabaseCollector().collect():
        values = {"".join(sample.labels.values()): sample.value for sample in gauge.samples}
        found[gauge.name.removeprefix("idempotency_")] = values.get("", values)
    return found


def counted(sql: str) -> Any:
    """Return what a statement counts: a number, a list of numbers, or numbers by name. Ages in
    seconds may differ a little: the statement runs after the page."""
    with connection.cursor() as cursor:
        cursor.execute(sql)
        rows = cursor.fetchall()
    if len(cursor.description or rows[0]) == 2:
        return dict(rows)
    value = rows[0][0]
    return pytest.approx(float(value), abs=60) if isinstance(value, Decimal) else value


@pytest.fixture
def staff() -> Client:
    return person()


@pytest.fixture
def outage(staff: Any) -> None:
    filled.fill_keys(300, UNFINISHED, 10)
    filled.fill_jobs(700, FAILED)
    filled.fill_log(staff.user.pk, 400)
    with connection.cursor() as cursor:
        for statement in MORE:
            cursor.execute(statement)


@pytest.fixture
def work(staff: Client, outage: None, monkeypatch: pytest.MonkeyPatch) -> BulkWork:
    """Acknowledge a group; return the work, of which a chunk is done."""
    monkeypatch.setattr(_bulk_work, "TURN_SECONDS", -1)
    url = f"{KEYS}bulk/acknowledge/?state=stuck&stuck_code=view_gave_up"
    (sent,) = re.findall(r'name="work" value="([^"]+)"', staff.get(url).text)
    assert staff.post(url, {"work": sent, "note": ""}).status_code == 302
    assert _bulk_work.work_off("default")
    return BulkWork.objects.get()


def test_each_number_on_each_page_is_that_of_a_statement(staff: Client, work: BulkWork) -> None:
    pages: dict[str, Any] = {"doctor": diagnose().measured, "metrics": metrics()}
    wrong = []
    for parts in (of_dashboard(), of_lists(), of_a_key(), of_bulk_work(work), of_monitoring()):
        for page, what, shown, sql in parts:
            if page not in pages:
                pages[page] = staff.get(page)
            found, wanted = shown(pages[page]), counted(sql)
            if found != wanted or not found:
                wrong.append(f"{page} {what}: {found}, and not {wanted}")
    assert wrong == []


@pytest.mark.usefixtures("outage")
def test_each_number_of_the_dashboard_leads_to_a_list_of_so_many_rows(staff: Client) -> None:
    """The time of the oldest key that waits for the completer leads to the keys that wait."""
    context = staff.get(DASHBOARD).context
    drawn = [context[name] for name in ("by_state", "jobs_by_age", "jobs_failed")]
    drawn += [bars for _, bars in context["by_point"]]
    shown = [(context["unfinished"], context["unfinished_url"])]
    shown += [(bar.count, bar.url) for bars in drawn for bar in bars]
    shown += [(group.count, KEYS + query) for group, query in context["groups"]]
    shown += [(group.count, JOBS + query) for group, query in context["job_groups"]]
    told = [(finding.seen, url) for finding, url in context["findings"] if url]
    told += [(text, url) for text, url in context["notes"]]
    shown += [(number(text), url) for text, url in told if "for the completer" not in text]
    shown += [(counted(count(f"{FREE} AND {NOT_GIVEN_UP} AND {DUE}")), f"{KEYS}?state=due")]
    assert len(told) == 7
    assert f"{KEYS}?state=due" in dict(map(reversed, told))
    wrong = []
    for wanted, url in shown:
        found = results(staff.get(url))
        if found != min(wanted, MAX_COUNT + 1):
            wrong.append(f"{url}: {found}, and not {wanted}")
    assert wrong == []


@pytest.mark.usefixtures("outage")
def test_the_action_of_a_group_covers_all_its_keys(staff: Client) -> None:
    context = staff.get(DASHBOARD).context
    for group, query in context["groups"]:
        for _, url in context["key_actions"][1:]:
            question = staff.get(f"{url}{query}").context
            assert question["eligible"] == question["work"].expected == group.count
            assert [count for _, count in question["groups"]] == [group.count]
        assert staff.get(f"{KEYS}{query}").context["cl"].paginator.count in (5000, group.count)
    [(group, query)] = context["job_groups"]
    assert staff.get(f"{JOBS}bulk/retry/{query}").context["eligible"] == group.count == FAILED
