"""Wrappers of ``connection.execute_wrapper()`` that do what those of common packages do."""

from collections.abc import Callable
from typing import Any

from psycopg.pq import TransactionStatus

Wrapper = Callable[..., Any]


def to_the_last(result: Any) -> Any:
    """Go to the last result, as django-pghistory and django-pgtrigger do with psycopg 3."""
    while result is not None and result.nextset():
        pass
    return result


def history(execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Send a context before each statement that may write, as the middleware of django-pghistory
    does."""
    cursor = context["cursor"]
    errored = cursor.connection.info.transaction_status == TransactionStatus.INERROR
    if not (
        sql.lower().startswith(("select", "begin", "set transaction"))
        or getattr(cursor, "name", None)
        or errored
    ):
        if isinstance(params, dict):
            params.update(of_wrapper="request 7")
            sql = "SELECT set_config('test.context', %(of_wrapper)s, true); " + sql
        else:
            params = ("request 7", *(params or ()))
            sql = "SELECT set_config('test.context', %s, true); " + sql
    return to_the_last(execute(sql, params, many, context))


def ignore(execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Send the names of ignored triggers before each statement, as ``pgtrigger.ignore()`` does."""
    cursor = context["cursor"]
    if (
        not getattr(cursor, "name", None)
        and cursor.connection.info.transaction_status != TransactionStatus.INERROR
    ):
        sql = f"SELECT set_config('test.context', %s, true); {sql}"
        params = ["request 7", *(params or ())]
    return to_the_last(execute(sql, params, many, context))


def tenant(execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Set the tenant with a statement of its own on the driver's cursor, as setters of tenants and
    time limits do."""
    with context["cursor"].cursor.connection.cursor() as own:
        own.execute("SELECT set_config('test.context', 'request 7', false)")
    return execute(sql, params, many, context)


def comment(execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Append a comment, as tracers do, and read what the cursor tells of the result."""
    result = execute(
        f"{sql} /* traceparent='00-{context['connection'].alias}' */", params, many, context
    )
    assert context["cursor"].cursor.rowcount >= -1
    return result


def in_place(execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Empty the parameters after the statement, as code that does not want to keep them does."""
    result = execute(sql, params, many, context)
    if isinstance(params, list | dict):
        params.clear()
    return result


def silent(execute: Any, *statement: Any) -> None:
    """Return nothing."""
    execute(*statement)


def in_front(execute: Any, sql: str, *more: Any) -> Any:
    """Send a query before each write, and leave its result in front of that of the write."""
    return execute(f"SELECT 1; {sql}" if sql.startswith(("INSERT", "UPDATE")) else sql, *more)


WRAPPERS: list[Wrapper] = [history, ignore, tenant, comment, in_place, silent]
SETTERS: list[Wrapper] = [history, ignore, tenant]
