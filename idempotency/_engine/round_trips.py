"""The claim of a plain run in one round trip with BEGIN, and the last statement of a transaction in
one with COMMIT.

libpq's pipeline mode sends several statements before it reads a result. After an error PostgreSQL
skips the rest, so a COMMIT behind a statement that fails does nothing. It is known which statement
failed: an error of the COMMIT is never taken for one of the statement before it. psycopg's own
pipeline costs more processor time than a round trip over a unix socket.
Source: PostgreSQL, "Pipeline Mode" of libpq.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import psycopg
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import debug_transaction
from psycopg import IsolationLevel, generators
from psycopg.abc import PQGen
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Ready, Wait

from idempotency import conf
from idempotency._engine.cursors import is_instrumented, numbered
from idempotency._engine.database_product import is_citus
from idempotency._hidden import Hidden, Parameters

_NOT_NOTED = nullcontext()
_GOOD = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)
#: libpq before 14 has no pipeline mode.
_SUPPORTED = psycopg.Pipeline.is_supported()
#: After this number of losses a connection prepares no statement: a pooler changes the server, or
#: the project sends DEALLOCATE ALL or DISCARD ALL.
_MAX_LOSSES = 2
#: The server has no statement of this name, or its plan does not fit to a changed table.
_STALE = (psycopg.errors.InvalidSqlStatementName, psycopg.errors.FeatureNotSupported)
#: The attribute of a connection with its prepared statements.
_PREPARED = "_idempotency_prepared"
#: The attribute of a connection of Django with the adapters of its values, and the settings on
#: which they depend. They refer to the connection of psycopg, which would never be freed with them.
_ADAPTERS = "_idempotency_adapters"
_SETTINGS = (b"client_encoding", b"DateStyle", b"TimeZone")

#: A statement with numbered parameters, and the types of these.
_Key = tuple[str, tuple[int, ...]]

#: What an error of a statement means: an exception without arguments.
Meanings = Mapping[type[psycopg.Error], type[Exception]]


class StaleStatement(psycopg.errors.SerializationFailure):
    """The server has lost a prepared statement, or has another one of its name. The transaction was
    rolled back, and may succeed on a retry."""


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """The first row of a statement, None if there is none; the number of rows that it returned or
    changed; and the values of the SHOW statements before it."""

    row: tuple[Any, ...] | None
    rows: int
    shown: tuple[str, ...] = ()


@dataclass(slots=True)
class _Prepared:
    """The names of the prepared statements of one connection, and how often it has sent the
    others."""

    names: dict[_Key, bytes] = field(default_factory=dict)
    uses: Counter[_Key] = field(default_factory=Counter)
    losses: int = 0


def can_be_merged(connection: BaseDatabaseWrapper) -> bool:
    """Return whether transactions of an open connection begin and end this way."""
    return (
        _SUPPORTED
        and connection.connection is not None
        and conf.get().MERGE_ROUND_TRIPS
        and not is_citus(connection)
        and not is_instrumented(connection)
    )


def run(
    connection: BaseDatabaseWrapper,
    text: str,
    parameters: Parameters,
    *,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
    meanings: Meanings = MappingProxyType({}),
) -> Result:
    """Send a statement with those before and after it; return its result. If psycopg would send
    BEGIN first, it is sent too. If the server has lost a prepared statement before anything else
    happened in the transaction, the statements are sent once more.

    Raises TransactionManagementError if ``after`` would end a broken transaction.
    Raises what an error of the statement itself means, by ``meanings``.
    Raises the first other error.
    """
    connection.validate_thread_sharing()
    connection.validate_no_broken_transaction()
    own: psycopg.Connection[Any] = connection.connection
    with noted_in_log(connection, [*before, text, *after]), connection.wrap_database_errors:
        begins = own.pgconn.transaction_status == TransactionStatus.IDLE
        if begins and not before and not own.autocommit:
            before = [begin(own)]
        try:
            return _run(connection, text, parameters, before, after, meanings)
        except StaleStatement:
            if not begins:
                raise
            own.rollback()
            return _run(connection, text, parameters, before, after, meanings)


def begin(own: "psycopg.Connection[Any]", isolation: IsolationLevel | None = None) -> str:
    """Return the BEGIN that psycopg would send, by default at the connection's own level."""
    level = own.isolation_level if isolation is None else isolation
    text = "BEGIN" if level is None else f"BEGIN ISOLATION LEVEL {level.name.replace('_', ' ')}"
    if own.read_only is not None:
        text += " READ ONLY" if own.read_only else " READ WRITE"
    if own.deferrable is not None:
        text += " DEFERRABLE" if own.deferrable else " NOT DEFERRABLE"
    return text


def _run(
    connection: BaseDatabaseWrapper,
    text: str,
    parameters: Parameters,
    before: Sequence[str],
    after: Sequence[str],
    meanings: Meanings,
) -> Result:
    own: psycopg.Connection[Any] = connection.connection
    server, prepared = own.pgconn, _prepared(own)
    query, names = numbered(text)
    settings = own, *map(server.parameter_status, _SETTINGS)
    # No other thread may use them meanwhile.
    made_for, transformer = vars(connection).pop(_ADAPTERS, (None, None))
    if made_for != settings:
        transformer = Transformer(own)
    auto = [PyFormat.AUTO] * len(names)
    # A partial of libpq's functions would show the values.
    values = Hidden(transformer.dump_sequence([parameters.value[name] for name in names], auto))
    types, formats = transformer.types or (), transformer.formats
    sends: list[Callable[[], None]] = [
        partial(server.send_query_params, each.encode(), None) for each in before
    ]
    key, index = (query, types), len(before)
    if (name := prepared.names.get(key)) is None and (name := _new_name(own, prepared, key)):
        sends.append(partial(server.send_prepare, name, query.encode(), types))
        index += 1
    if name is None:
        sends.append(lambda: server.send_query_params(query.encode(), values.value, types, formats))
    else:
        sends.append(lambda: server.send_query_prepared(name, values.value, formats))
    sends += [partial(server.send_query_params, each.encode(), None) for each in after]
    with own.lock:
        try:
            results = own.wait(_exchanging(server, sends))
        finally:
            if server.pipeline_status != PipelineStatus.OFF:
                server.finish()  # The exchange has not ended.
    if name is not None and len(results) > index:
        prepared.names[key] = name  # It stays, whatever becomes of the transaction.
    if results[-1].status not in _GOOD:
        raise _error(own, results[-1], key if len(results) == index + 1 else None, name, meanings)
    result = results[index]
    transformer.set_pgresult(result)
    row = transformer.load_row(0, tuple) if result.ntuples else None
    transformer.set_pgresult(None)  # It would keep the row in memory.
    vars(connection)[_ADAPTERS] = settings, transformer
    return Result(row, result.command_tuples or 0, shown(results[: len(before)]))


def send(connection: BaseDatabaseWrapper, statements: Sequence[str]) -> tuple[str, ...]:
    """Send statements without parameters in one message; return the values of SHOW."""
    own: psycopg.Connection[Any] = connection.connection
    with (
        noted_in_log(connection, statements),
        connection.wrap_database_errors,
        own.lock,
    ):
        own.pgconn.send_query("; ".join(statements).encode())
        results = own.wait(generators.execute(own.pgconn))
        result = results[-1]
        if result.status not in _GOOD:
            # As in psycopg's cursors, an error without SQLSTATE is a broken connection.
            if result.error_field(DiagnosticField.SQLSTATE):
                raise error_from_result(result)
            raise psycopg.OperationalError(own.pgconn.get_error_message())
        return shown(results)


def noted_in_log(
    connection: BaseDatabaseWrapper, statements: Sequence[str]
) -> AbstractContextManager[None]:
    """Note a message in Django's query log, without the statements that only read a setting."""
    if not connection.queries_logged:
        return _NOT_NOTED
    return debug_transaction(
        connection, "; ".join(text for text in statements if not text.startswith("SHOW "))
    )


def shown(results: Sequence[PGresult]) -> tuple[str, ...]:
    """Return the values of the SHOW statements among ``results``."""
    return tuple([(result.get_value(0, 0) or b"").decode() for result in results if result.ntuples])


def _error(
    own: "psycopg.Connection[Any]",
    result: PGresult,
    failed: _Key | None,
    name: bytes | None,
    meanings: Meanings,
) -> Exception:
    """Return the exception for a failed result. ``failed`` is the key of the statement, None if
    another one failed."""
    error = error_from_result(result, encoding=own.info.encoding)
    prepared = _prepared(own)
    if error.sqlstate is None:  # As in psycopg's cursors, a broken connection.
        return psycopg.OperationalError(own.pgconn.get_error_message())
    if failed is not None and (meaning := meanings.get(type(error))) is not None:
        return meaning()
    if name is not None and isinstance(error, psycopg.errors.DuplicatePreparedStatement):
        prepared.losses = _MAX_LOSSES
        return StaleStatement(*error.args)
    if isinstance(error, _STALE) and failed in prepared.names:
        prepared.names.clear()
        prepared.losses += 1
        return StaleStatement(*error.args)
    return error


def _new_name(own: "psycopg.Connection[Any]", prepared: _Prepared, key: _Key) -> bytes | None:
    """Return the name of a statement that is worth preparing now, otherwise None."""
    prepared.uses[key] += 1
    # With other cursors the project has statements that psycopg prepares, and drops with all others
    # after a rollback.
    settled = issubclass(own.cursor_factory, psycopg.ClientCursor) and prepared.losses < _MAX_LOSSES
    threshold = own.prepare_threshold
    if not settled or threshold is None or prepared.uses[key] <= threshold:
        return None
    # After a loss the server may still have a plan that does not fit.
    digest = hashlib.sha256(repr((key, prepared.losses)).encode()).hexdigest()
    return f"idempotency_{digest[:16]}".encode()


def _prepared(own: "psycopg.Connection[Any]") -> _Prepared:
    found: _Prepared | None = getattr(own, _PREPARED, None)
    return found or vars(own).setdefault(_PREPARED, _Prepared())


def _exchanging(server: PGconn, sends: list[Callable[[], None]]) -> PQGen[list[PGresult]]:
    """Send statements and return their results up to the first error."""
    server.enter_pipeline_mode()
    for send in sends:
        send()
    server.pipeline_sync()
    while server.flush():
        ready = yield Wait.RW
        if ready and ready & Ready.R:
            server.consume_input()
    results: list[PGresult] = []
    try:
        while True:
            while server.is_busy():
                yield Wait.R
                server.consume_input()
            if (result := server.get_result()) is None:
                if server.status != ConnStatus.OK:  # libpq has closed it; nothing else will come.
                    raise psycopg.OperationalError(server.get_error_message())
            elif result.status == ExecStatus.PIPELINE_SYNC:
                break
            elif not results or results[-1].status in _GOOD:
                results.append(result)
    except psycopg.OperationalError:
        if not results or results[-1].status in _GOOD:
            raise
        # The server named the reason, such as a time limit, before it closed the connection.
        return results
    server.exit_pipeline_mode()
    return results
