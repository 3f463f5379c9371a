"""Create the mutants: modules with one small bug each.

Cosmic Ray creates mutants of Python's operators. This module also removes statements and changes
SQL.
"""

import ast
import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

from tests.mutation.choice import SAMPLED, SEED
from tests.mutation.warm import signature

ROOT = Path(__file__).resolve().parents[2]
SQL_MODULES = tuple(
    f"idempotency/_engine/{name}.py" for name in ("statements", "updates", "advisory_locks")
)
#: Operators of Cosmic Ray, without those that change ``X | None`` in annotations or the bare ``*``
#: of a signature.
OPERATORS = (
    *("AddNot", "ReplaceUnaryOperator_Delete_Not", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
    *("ReplaceComparisonOperator_Is_IsNot", "ReplaceComparisonOperator_IsNot_Is"),
    *("ReplaceComparisonOperator_Eq_NotEq", "ReplaceComparisonOperator_NotEq_Eq"),
    *(
        "ReplaceComparisonOperator_Gt_GtE",
        "ReplaceComparisonOperator_LtE_Lt",
        "ReplaceComparisonOperator_LtE_Gt",
    ),
    *("ReplaceBinaryOperator_Add_Sub", "ReplaceBinaryOperator_Sub_Add"),
    *("NumberReplacer", "ExceptionReplacer", "RemoveDecorator"),
)
#: Bugs in the texts of the statements: a text that occurs once, and its replacement. Each text of
#: the modules is in one line.
SQL = (
    ("k.id = %(id)s AND k.claim_token = %(token)s", "k.id = %(id)s"),
    ("k.recovery_point = %(reached)s", "(true OR k.recovery_point = %(reached)s)"),
    (
        "(k.stuck_at IS NULL OR k.stuck_code IN {tuple(map(str, OPEN_TO_RETRIES))!r})",
        "(k.stuck_at IS NULL)",
    ),
    ("(k.stuck_at IS NULL OR k.stuck_code IN {tuple(map(str, OPEN_TO_RETRIES))!r})", "(true)"),
    (
        "(k.stuck_at IS NULL OR k.stuck_code IN {tuple(map(str, WAITS_FOR_DEPLOY))!r})",
        "(k.stuck_at IS NULL)",
    ),
    ("(k.stuck_at IS NULL OR k.stuck_code IN {tuple(map(str, WAITS_FOR_DEPLOY))!r})", "(true)"),
    ("stuck_at = NULL, stuck_code = '', stuck_reason = ''", "stuck_at = k.stuck_at"),
    (
        "(k.locked_until IS NULL OR k.locked_until <= {",
        "(k.locked_until IS NULL OR k.locked_until > {",
    ),
    ("(k.locked_until IS NULL OR k.locked_until <= {", "(k.locked_until <= {"),
    ("{silent} > {least}", "{silent} > 0"),
    (
        "later_by.format('k.lease_seconds', 'second')",
        "later_by.format('k.lease_seconds', 'minute')",
    ),
    ("k.expires_at < {self.now}", "k.expires_at > {self.now}"),
    ("later_by.format('k.retention_hours', 'hour')", "later_by.format('k.retention_hours', 'day')"),
    (", expires_at = {self.expiry}, ", ", "),
    ("refused_at = NULL, expires_at = NULL", "refused_at = k.refused_at"),
    (
        "IS NULL OR k.locked_until <= excluded.created_at",
        "IS NULL OR k.locked_until > excluded.created_at",
    ),
    ("(k.locked_until IS NULL OR k.locked_until <= excluded", "(k.locked_until <= excluded"),
    ("(k.finished_at IS NULL AND k.request_fingerprint", "(k.request_fingerprint"),
    ("k.request_fingerprint = %(request_fingerprint)s AND {unlocked} ", "{unlocked} "),
    (
        "k.request_fingerprint = %(request_fingerprint)s AND {unlocked} ",
        "k.request_fingerprint = %(request_fingerprint)s ",
    ),
    ("AND {_OPEN_TO_RETRIES} AND {self.dialect.known_point})", "AND {self.dialect.known_point})"),
    ("AND {_OPEN_TO_RETRIES} AND {self.dialect.known_point})", "AND {_OPEN_TO_RETRIES})"),
    ("DO UPDATE SET claim_token = excluded.claim_token, ", "DO UPDATE SET "),
    ("locked_until = excluded.locked_until, lease_seconds", "lease_seconds"),
    ("lease_seconds = excluded.lease_seconds, ", ""),
    ("last_run_at = excluded.last_run_at, {_NEXT_ATTEMPT}", "{_NEXT_ATTEMPT}"),
    ("excluded.last_run_at, {_NEXT_ATTEMPT}, {CLEAR_STUCK}", "excluded.last_run_at, {CLEAR_STUCK}"),
    ("{_NEXT_ATTEMPT}, {CLEAR_STUCK}, {_LAST_REQUEST}", "{_NEXT_ATTEMPT}, {_LAST_REQUEST}"),
    ("ELSE pg_try_advisory_xact_lock({KEY_LOCK}) END", "ELSE true END"),
    ("THEN (SELECT existing.claimable AND NOT existing.expired FROM existing) ", "THEN true "),
    ("existing WHERE NOT existing.expired) THEN", "existing) THEN"),
    ("WHEN NOT pg_try_advisory_xact_lock({MARK_KEY}, {MARK_REQUEST}) THEN 'same' ", ""),
    ("WHEN NOT pg_try_advisory_xact_lock({KEY_LOCK}) THEN 'other' ELSE", "ELSE"),
    ("CAST(%(lock)s AS bigint) # {_TABLE_ID}::bigint", "CAST(%(lock)s AS bigint)"),
    ("CAST(%(mark_key)s AS int) # {_TABLE_ID}::int", "CAST(%(mark_key)s AS int)"),
    (
        "SET claim_token = %(claim_token)s, lease_seconds = {_LEASE_OF_COMPLETER}",
        "SET lease_seconds = {_LEASE_OF_COMPLETER}",
    ),
    ("locked_until = {self.dialect.later_by.format(_LEASE_OF_COMPLETER, 'second')}, ", ""),
    (
        (
            "k.id = %(id)s AND k.finished_at IS NULL AND k.refused_at IS NULL AND"
            " {self.unlocked} AND {_NOT_GIVEN_UP} "
        ),
        "k.id = %(id)s AND k.refused_at IS NULL AND {self.unlocked} AND {_NOT_GIVEN_UP} ",
    ),
    (
        (
            "k.id = %(id)s AND k.finished_at IS NULL AND k.refused_at IS NULL AND"
            " {self.unlocked} AND {_NOT_GIVEN_UP} "
        ),
        "k.id = %(id)s AND k.finished_at IS NULL AND k.refused_at IS NULL AND {_NOT_GIVEN_UP} ",
    ),
    (
        (
            "k.id = %(id)s AND k.finished_at IS NULL AND k.refused_at IS NULL AND"
            " {self.unlocked} AND {_NOT_GIVEN_UP} "
        ),
        "k.id = %(id)s AND k.finished_at IS NULL AND k.refused_at IS NULL AND {self.unlocked} ",
    ),
    ("( k.claim_token = %(seen)s OR NOT %(early)s AND", "( NOT %(early)s AND"),
    ("OR NOT %(early)s AND", "OR"),
    ("OR k.next_run_at <= {self.now}) ) RETURNING", "OR true) ) RETURNING"),
    ("k.scope = %(scope)s AND {self.expired}", "k.scope = %(scope)s"),
    ("k.scope = %(scope)s AND {self.expired}", "{self.expired}"),
    (
        "recovery_point = %(recovery_point)s, locked_until = {self.lease_end}",
        "recovery_point = %(recovery_point)s",
    ),
    ("SET locked_until = {self.lease_end}, {_BEGUN} WHERE", "SET {_BEGUN} WHERE"),
    (
        "SET locked_until = {self.lease_end}, {_BEGUN} WHERE",
        "SET locked_until = {self.lease_end} WHERE",
    ),
    ("locked_until = {self.lease_end}, {_BEGUN}, call", "{_BEGUN}, call"),
    ("locked_until = {self.lease_end}, {_BEGUN}, call", "locked_until = {self.lease_end}, call"),
    ("{changes}, {_BEGUN}, {CLEAR_STUCK}", "{changes}, {CLEAR_STUCK}"),
    ("{_AT_POINT} AND k.stuck_code = %(stuck_code)s", "{_AT_POINT}"),
    ("{_AT_POINT} AND {UNTOUCHED}", "{_AT_POINT}"),
    ("{self.finish} AND {UNTOUCHED}", "{self.finish}"),
    ("attempts = k.attempts + 1, {NOT_REFUSED}", "attempts = k.attempts + 1"),
    ("begun = true, {NOT_REFUSED}", "begun = true"),
    ("begun = true, {NOT_REFUSED}", "{NOT_REFUSED}"),
    ("k.finished_at IS NULL AND k.refused_at IS NULL AND", "k.finished_at IS NULL AND"),
    ("self._update(changes, _AT_POINT)", "self._update(self.finished, _AT_POINT)"),
    ("{body}, locked_until = NULL, {CLEAR_STUCK}", "{body}, {CLEAR_STUCK}"),
    ("locked_until = NULL, last_error", "last_error"),
    ("{_FENCE} AND k.finished_at IS NULL", "{_FENCE}"),
    ("WHERE {condition} AND k.finished_at IS NULL", "WHERE {condition}"),
    ("k.completer_attempts * %(counting)s", "k.completer_attempts + 0 * %(counting)s"),
    (
        "k.stuck_at IS NULL AND k.refused_at IS NULL AND {self.unlocked}",
        "k.refused_at IS NULL AND {self.unlocked}",
    ),
    (
        "k.stuck_at IS NULL AND k.refused_at IS NULL AND {self.unlocked}",
        "k.stuck_at IS NULL AND {self.unlocked}",
    ),
    (
        "k.stuck_at IS NULL AND k.refused_at IS NULL AND {self.unlocked}",
        "k.stuck_at IS NULL AND k.refused_at IS NULL",
    ),
    (" AND pid <> pg_backend_pid()", ""),
    (" AND database = (SELECT oid FROM pg_database WHERE datname = current_database())", ""),
    ("(classid << 32 | objid) = {KEY_LOCK}", "objid = {KEY_LOCK} & 4294967295"),
    (" AND objid <> {MARK_REQUEST}::bigint & 4294967295", ""),
    (" AND objid >> 24 = ({MARK_REQUEST}::bigint & 4294967295) >> 24", ""),
    ("FROM lock JOIN mark USING (pid)", "FROM mark"),
    ("RETURNING_CTID = ' RETURNING", "RETURNING_CTID = ' AND false RETURNING"),
    (
        " AND k.ctid = %(position)s::tid RETURNING",
        " AND false AND %(position)s::tid IS NOT NULL RETURNING",
    ),
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug: the module's text with the bug, its name in SURVIVORS.md, and the lines that a test
    must run."""

    module: str
    text: str
    name: str
    function: str
    lines: range

    @property
    def digest(self) -> str:
        """The key under which the outcome is stored."""
        return hashlib.sha256(f"{self.module}\n{self.text}".encode()).hexdigest()


def mutants_of(name: str, *, whole: bool = False) -> list[Mutant]:
    """Return the mutants of a module. Without ``whole``, return a sample of them that the seed
    determines, if the module is sampled."""
    (module,) = (
        str(found.relative_to(ROOT))
        for found in (ROOT / "idempotency").glob("**/*.py")
        if found.with_suffix("").as_posix().endswith(f"/{name}") and "testing" not in found.parts
    )
    found = list(mutants(module, (ROOT / module).read_text()))
    if whole or len(found) <= SAMPLED.get(name, len(found)):
        return found
    drawn = sorted(random.Random(SEED).sample(range(len(found)), SAMPLED[name]))
    return [found[number] for number in drawn]


def mutants(module: str, text: str) -> Iterator[Mutant]:
    """Yield every mutant of a module once."""
    if module in SQL_MODULES:
        text = _in_one_line(text)
    met, names = {_compiled(text)}, Counter[str]()
    file = module.rpartition("/")[2]
    for changed in _of_sql(text) if module in SQL_MODULES else _of_python(text):
        compiled = _compiled(changed)
        if compiled is None or compiled in met:
            continue
        met.add(compiled)
        first, before, after = _difference(text, changed)
        if before.startswith("@dataclass") and after.startswith("@dataclass"):
            continue  # frozen and slots only prevent mistakes, and do not change the behaviour.
        function, lines = _place(text, first)
        name = f"{file}: {function}: {before} -> {after}"
        names[name] += 1
        yield Mutant(
            module,
            changed,
            name + (f" ({names[name]})" if names[name] > 1 else ""),
            function,
            lines,
        )


def _compiled(text: str) -> Any:
    """Return the compiled module without line numbers, or None if it is invalid. Two texts with one
    result are one mutant."""
    try:
        return signature(compile(text, "mutant", "exec", dont_inherit=True, optimize=0))
    except SyntaxError:
        return None


def _of_python(text: str) -> Iterator[str]:
    for name in OPERATORS:
        operator, occurrence = get_operator(f"core/{name}")(), 0
        while (changed := mutate_code(text, operator, occurrence)) is not None:
            yield changed
            occurrence += 1
    yield from _with_one_statement_less(text)


def _with_one_statement_less(text: str) -> Iterator[str]:
    """Replace each statement that has an effect, and binds no name that a later line needs, with
    ``pass``."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        match node:
            case (
                ast.Expr(value=ast.Call() | ast.YieldFrom() | ast.Await())
                | ast.Raise()
                | ast.Continue()
                | ast.Return()
            ):
                pass
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
                pass
            case _:
                continue
        assert node.end_lineno is not None
        yield "".join(
            [*lines[: node.lineno - 1], " " * node.col_offset, "pass\n", *lines[node.end_lineno :]],
        )


def _of_sql(text: str) -> Iterator[str]:
    everywhere = "".join(_in_one_line((ROOT / module).read_text()) for module in SQL_MODULES)
    for found, instead in SQL:
        assert everywhere.count(found) == 1, (
            f"tests/mutation/mutants.py: {SQL_MODULES} have {everywhere.count(found)} times"
            f" {found!r}"
        )
        if found in text:
            yield text.replace(found, instead)


def _in_one_line(text: str) -> str:
    """Return the module with each of its texts in one line, so that a bug is found wherever the
    lines of a statement break."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = re.sub(r"\s*\n\s*", " ", node.value)
    return ast.unparse(tree)


def _difference(text: str, changed: str) -> tuple[int, str, str]:
    """Return the number of the first line that differs, and the old and the new text of all
    differences, in one line each."""
    lines, others = text.splitlines(), changed.splitlines()
    blocks = [
        block
        for block in SequenceMatcher(None, lines, others, autojunk=False).get_opcodes()
        if block[0] != "equal"
    ]
    before = " ".join(line.strip() for _, start, end, _, _ in blocks for line in lines[start:end])
    after = " ".join(line.strip() for _, _, _, start, end in blocks for line in others[start:end])
    return blocks[0][1] + 1, _without_comment(before), _without_comment(after)


def _without_comment(line: str) -> str:
    return line.strip().partition("  # ")[0]


def _place(text: str, number: int) -> tuple[str, range]:
    """Return the name of the class or function around a line, and the lines of its statement: a
    ``def``'s body, or the head.

    The range is empty if the line runs when the module is imported.
    """
    around = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and number in _lines(node)
    ]
    name = ".".join(node.name for node in around if isinstance(node, (*_FUNCTIONS, ast.ClassDef)))
    if not any(isinstance(node, _FUNCTIONS) for node in around):
        return name or "the module", range(0)
    lines = _lines(innermost := around[-1])
    body = min(
        (
            node.lineno
            for node in ast.walk(innermost)
            if isinstance(node, ast.stmt) and node is not innermost
        ),
        default=0,
    )
    if body and isinstance(innermost, _FUNCTIONS):
        lines = range(body, lines.stop)
    elif body:
        lines = range(lines.start, body)
    return name, lines


def _lines(node: ast.stmt) -> range:
    decorators = [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
    return range(min([node.lineno, *decorators]), (node.end_lineno or node.lineno) + 1)
