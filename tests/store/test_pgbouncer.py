"""PgBouncer in transaction mode with ``max_prepared_statements``: each transaction may get another
server connection, which has the statements of other clients."""

import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from rides_demo.processes import debian
from tests.kit import pgbouncer
from tests.kit.serving import Sender, another_client
from tests.kit.threads import at_once
from tests.kit.views import Counted, View, both_kinds
from tests.models import Entry

pytestmark = [pytest.mark.processes, pytest.mark.postgres, pytest.mark.django_db(transaction=True)]
CLIENTS, REQUESTS = 6, 15
#: Fewer server connections than clients.
KEEPS_STATEMENTS = "max_prepared_statements = 100\ndefault_pool_size = 2"


@pytest.fixture
def _bouncer(short_folder: Path) -> Iterator[None]:
    """Connect through a PgBouncer that supports prepared statements."""
    try:
        program = debian.program("pgbouncer", "pgbouncer")
    except debian.NotToBeHad as error:
        pytest.skip(str(error))
    version = re.findall(
        r"\d+",
        subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout,
    )
    if (int(version[0]), int(version[1])) < (1, 21):
        pytest.skip(
            f"PgBouncer {'.'.join(version[:2])} keeps no prepared statements; put 1.21 or later"
            " first on the PATH"
        )
    options: dict[str, Any] = connection.settings_dict["OPTIONS"]
    before = dict(options)
    with pgbouncer.PgBouncer(program, short_folder, Path(options["host"]), KEEPS_STATEMENTS):
        connection.close()
        options |= {"host": str(short_folder), "prepare_threshold": 1}
        yield
        connection.close()
        options.clear()
        options |= before


@both_kinds
@pytest.mark.usefixtures("_bouncer")
def test_prepared_statements_follow_the_client(
    kind: Callable[..., View], serve: Callable[..., None], sender: Sender
) -> None:
    serve(view=kind(Counted()))

    def send_all(client: int) -> tuple[bool, int]:
        browser = another_client(sender)
        for number in range(REQUESTS):
            key = f"key-{client}-{number}"
            assert browser.send(key=key).status_code == 201
            assert browser.send(key=key)["Idempotent-Replayed"] == "true"
        prepared = vars(connection.connection)["_idempotency_prepared"]
        return bool(prepared.names), prepared.losses

    assert (
        at_once([partial(send_all, client) for client in range(CLIENTS)]) == [(True, 0)] * CLIENTS
    )
    assert Entry.objects.count() == CLIENTS * REQUESTS
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT name FROM pg_prepared_statements WHERE statement LIKE"
            " '%%idempotency_idempotencykey%%'"
        )
        assert {name.partition("_")[0] for (name,) in cursor.fetchall()} == {"PGBOUNCER"}
