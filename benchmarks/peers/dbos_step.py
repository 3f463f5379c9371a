"""DBOS: a workflow of one step and one exactly-once transaction, like an operation with a call."""

from dbos import DBOS, SetWorkflowID
from django.http import HttpRequest, HttpResponse, JsonResponse

from benchmarks.peers.dbos import DISTRIBUTION, charge, close, prepare, work

__all__ = ["DISTRIBUTION", "VIEWS", "close", "prepare"]


@DBOS.workflow()
def _call() -> int:
    charge()
    return work()


def _view(request: HttpRequest) -> HttpResponse:
    with SetWorkflowID(request.headers["Idempotency-Key"]):
        return JsonResponse({"id": _call()}, status=201)


VIEWS = {"call": _view}
