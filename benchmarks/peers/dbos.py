"""DBOS: the ride as a workflow of three exactly-once transactions and a step, with the client's key
as workflow id.

The system tables of DBOS are in the same database as the work, as its documentation permits for
PostgreSQL. Transactions run at its default level, SERIALIZABLE, like the phases of the ride. DBOS
does not compare the arguments of a repeated id.
"""

import os

import sqlalchemy
from dbos import DBOS, DBOSConfig, SetWorkflowID, SQLAlchemyDatasource
from django.http import HttpRequest, HttpResponse, JsonResponse

from benchmarks import views

DISTRIBUTION = "dbos"

_datasource = SQLAlchemyDatasource.create(os.environ["DATABASE_URL"])
_INSERT = sqlalchemy.text("INSERT INTO bench_row (name) VALUES ('x') RETURNING id")


@_datasource.transaction()
def work() -> int:
    return int(_datasource.sql_session().execute(_INSERT).scalar_one())


@DBOS.step()
def charge() -> None:
    views.charge()


@DBOS.workflow()
def _ride() -> int:
    work()
    charge()
    work()
    return work()


def _view(request: HttpRequest) -> HttpResponse:
    with SetWorkflowID(request.headers["Idempotency-Key"]):
        return JsonResponse({"id": _ride()}, status=201)


def prepare() -> None:
    """Launch DBOS in this process."""
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": os.environ["DATABASE_URL"],
        "log_level": "ERROR",
    }
    DBOS(config=config)
    DBOS.launch()


def close() -> None:
    """Stop the threads of DBOS."""
    DBOS.destroy()


VIEWS = {"ride": _view}
