"""The generated parts of the reference: ``python -m tests.reference`` writes them into the pages.

A page has a pair of comments around each generated part; the rest of the page is written by hand.
The result is committed, so that the pages are readable in the repository.
``tests/docs/test_reference.py`` compares the pages with the code.
"""

import argparse
import ast
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parents[1] / "docs" / "reference"
#: The maximum length of a line of prose in the pages.
LINE = 100

#: The unit of a setting by the end of its name, and the kind of value of a setting without a unit.
UNITS = {
    "_SECONDS": "seconds",
    "_HOURS": "hours",
    "_BYTES": "bytes",
    "_LENGTH": "characters",
    "_ATTEMPTS": "runs",
    "_RETRIES": "further tries",
    "_REQUESTS": "requests",
    "_STATUS": "HTTP status",
    "_STATUSES": "HTTP statuses",
}
KINDS = {
    bool: "True or False",
    "CREDENTIAL_NAMES": "names of parameters and headers",
    "HEADER_NAMES": "names of headers",
    "REPLAYED_HEADER": "name of a header",
    "PHASE_ISOLATION": "isolation level",
    "PLAIN_ISOLATION": "isolation level",
    "PROBLEM_TYPE_BASE": "start of a URI",
    "TRACE_URL": "address with `{trace_id}`",
    "CONFIRM_REPLICATED": 'True, False or `"storage"`',
    "ENQUEUERS": "queue name to dotted path",
    "JOB_MODULES": "names of modules",
    "KEY_VALIDATOR": "callable or dotted path",
    "ERROR_RENDERER": "callable or dotted path",
    "PREPARE_REQUEST": "callable or dotted path",
    "ANSWER_FOR_KEY": "callable or dotted path",
}
#: Notes for fields that need one, and have no help text in the code.
NOTES = {
    "IdempotencyKey.user": (
        "The user who sent the request; null without a signed-in user. The database has no"
        " constraint for this column."
    ),
    "IdempotencyKey.created_at": "Time of the first claim.",
    "IdempotencyKey.finished_at": "Time at which the response was stored.",
    "IdempotencyKey.stuck_at": "Time at which the key was marked as stuck.",
    "IdempotencyKey.completer_attempts": (
        "Number of runs by the completer. It becomes 0 after a hand-back, and when the key becomes"
        " stuck with `unknown_recovery_point`, `operation_missing` or `arguments_changed`."
    ),
    "IdempotencyKey.request_headers": (
        "The headers that a second run of a phased view needs, and the values of `keep=`. No"
        " credentials and no cookies."
    ),
    "IdempotencyKey.request_fingerprint": "A version and a hash of method, path, query and body.",
    "IdempotencyKey.recovery_point": "The last committed phase: `started` first, `finished` last.",
    "IdempotencyKey.last_error": "The error of the last run that failed.",
    "StagedJob.id": "Ordered by time; also the id of the job in the broker.",
    "StagedJob.last_error": "The error of the last hand-over that was refused.",
    "StagedJob.idempotency_key": "The request that staged it.",
    "DownstreamCall.key": "The request that made it.",
    "DownstreamCall.name": "The name of the call, which the view chooses.",
    "DownstreamCall.result": "The value that was passed to `record()`.",
    "ProcessedMessage.source": (
        "The sender of the message, such as `stripe`; `staged-job` for a staged job."
    ),
    "ProcessedMessage.message_id": "The id that the sender gave to the message.",
}
#: Columns that are private, and not on the page.
PRIVATE = {
    *("IdempotencyKey.begun", "IdempotencyKey.call_begun_at", "IdempotencyKey.claim_token"),
    *("IdempotencyKey.hangs", "IdempotencyKey.next_run_at", "IdempotencyKey.seed"),
    *("DownstreamCall.token", "StagedJob.group_position"),
}
#: The options that Django adds to every command, and one that the head of the page explains.
COMMON_OPTIONS = {
    *(
        "--database",
        "-h",
        "--help",
        "--version",
        "-v",
        "--verbosity",
        "--settings",
        "--pythonpath",
        "--traceback",
        "--no-color",
    ),
    *("--force-color", "--skip-checks"),
}


def settings_table() -> str:
    """Return each setting with its default, unit and meaning. Raises KeyError if a setting has no
    comment in the code."""
    from idempotency.conf import Settings

    comments = _comments(Settings)
    rows = [
        (
            f"`{field.name}`",
            f"`{written(getattr(Settings(), field.name))}`",
            unit_of(field),
            comments[field.name],
        )
        for field in fields(Settings)
    ]
    return _table(("name", "default", "unit or kind", "meaning"), rows)


def credentials_list() -> str:
    """Return the names of credentials that the app knows."""
    from idempotency._http.credentials import NAMES

    return _wrapped(", ".join(f"`{name}`" for name in NAMES))


def unit_of(field: Any) -> str:
    """Return the unit of a setting, or its kind of value. Raises KeyError if UNITS and KINDS have
    neither."""
    if field.type is bool:  # The name may end like the name of a number: COUNT_REQUESTS.
        return KINDS[bool]
    return (
        next((unit for end, unit in UNITS.items() if field.name.endswith(end)), None)
        or KINDS[field.name]
    )


def written(value: object) -> str:
    """Return a default as Python source."""
    return repr(sorted(value)) if isinstance(value, frozenset) else repr(value)


def models_tables() -> str:
    """Return the fields of each model."""
    from idempotency import models

    made = (
        models.IdempotencyKey,
        models.StagedJob,
        models.DownstreamCall,
        models.ProcessedMessage,
    )
    return "\n\n".join(_model(model) for model in made)


def _model(model: Any) -> str:
    meta = model._meta
    rows = [
        (f"`{field.name}`", _kind_of(field), _note_of(model, field))
        for field in meta.concrete_fields
        if not (
            field.primary_key and field.name == "id" and field.get_internal_type() == "BigAutoField"
        )
        and f"{model.__name__}.{field.name}" not in PRIVATE
    ]
    parts = [f"## {model.__name__}", _first(model.__doc__), _table(("field", "kind", "note"), rows)]
    if unique := [
        ", ".join(f"`{name}`" for name in constraint.fields)
        for constraint in meta.constraints
        if getattr(constraint, "fields", None)
        and not {f"{model.__name__}.{name}" for name in constraint.fields} & PRIVATE
    ]:
        parts.append(_wrapped("Unique together: " + "; ".join(unique) + "."))
    return "\n\n".join(parts)


def _kind_of(field: Any) -> str:
    kind = field.get_internal_type()
    length = (
        f", at most {field.max_length} characters"
        if getattr(field, "max_length", None) and "Char" in kind
        else ""
    )
    name = {
        "CharField": "text",
        "TextField": "text",
        "DateTimeField": "time",
        "UUIDField": "UUID",
        "JSONField": "JSON",
        "BinaryField": "bytes",
        "PositiveIntegerField": "whole number",
        "BooleanField": "true or false",
        "PositiveSmallIntegerField": "whole number",
        "PositiveBigIntegerField": "whole number",
    }.get(kind)
    if name is None:
        related = field.related_model
        of_the_app = related._meta.app_label == "idempotency"
        name = f"to {related.__name__ if of_the_app else 'the user'}"
    return name + length + (", may be null" if field.null else "")


def _note_of(model: Any, field: Any) -> str:
    return str(field.help_text) or NOTES.get(f"{model.__name__}.{field.name}", "")


def commands_tables() -> str:
    """Return the help of each command, without the options of COMMON_OPTIONS. The end of the help
    of the loops and their common options come first, once."""
    from django.core.management import load_command_class

    from idempotency.management.passes import LOOP_HELP, PassCommand

    folder = Path(__file__).parents[1] / "idempotency" / "management" / "commands"
    names = [path.stem for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    commands = {name: load_command_class("idempotency", name) for name in names}
    loops = [name for name in names if isinstance(commands[name], PassCommand)]
    of_loops = [_options(commands[name].create_parser("manage.py", name)) for name in loops]
    shared = _equal_except_defaults([dict(options) for options in of_loops])
    parts = [f"For the loops {', '.join(f'`{name}`' for name in loops)}:", _wrapped(LOOP_HELP)]
    parts.append(_table(("option", "meaning"), list(shared.items())))
    for name, command in commands.items():
        command.help = command.help.removesuffix(LOOP_HELP)
        parts.append(_command(name, command, shared if name in loops else {}))
    return "\n\n".join(parts)


def _equal_except_defaults(commands: list[dict[str, str]]) -> dict[str, str]:
    """Return the options that all of these commands have, with the default of each."""
    default = re.compile(r"\(default: (.*?)\)")
    found = {}
    for name, meaning in commands[0].items():
        meanings = [command.get(name, "") for command in commands]
        if len({default.sub("", each) for each in meanings}) == 1:
            defaults = ", ".join(value for each in meanings for value in default.findall(each))
            found[name] = default.sub(f"(defaults: {defaults})", meaning)
    return found


def _command(name: str, command: Any, shared: Mapping[str, str]) -> str:
    parser = command.create_parser("manage.py", name)
    parts = [f"## {name}", _wrapped(command.help)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = [(f"`{each.dest}`", each.help or "") for each in action._choices_actions]
            parts.append(_table(("action", "meaning"), about))
            parts.append(_table(("option", "of", "meaning"), list(_shared(action.choices))))
    if options := [option for option in _options(parser) if option[0] not in shared]:
        parts.append(_table(("option", "meaning"), options))
    return "\n\n".join(parts)


def _shared(actions: Mapping[str, argparse.ArgumentParser]) -> Iterator[tuple[str, str, str]]:
    """Yield each option of the actions of a command once, with the actions that take it."""
    takers: dict[tuple[str, str], list[str]] = {}
    for word, parser in actions.items():
        for option in _options(parser):
            takers.setdefault(option, []).append(word)
    for (option, meaning), words in takers.items():
        missing = [word for word in actions if word not in words]
        few = len(missing) < len(words)
        of = (f"all but {', '.join(missing)}" if missing else "all") if few else ", ".join(words)
        yield option, of, meaning


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) or COMMON_OPTIONS & {
            *action.option_strings
        }:
            continue
        several = "" if action.nargs == 1 else " ..."
        name = ", ".join(action.option_strings) or f"{action.metavar}{several}"
        value = (
            f" {action.metavar or action.dest.upper()}"
            if action.option_strings and action.nargs != 0
            else ""
        )
        yield f"`{name}{value}`", (action.help or "") % {"default": action.default}


def errors_table() -> str:
    """Return the exceptions, each with the first paragraph of its docstring."""
    from idempotency import exceptions

    found = [
        kind
        for _, kind in inspect.getmembers(exceptions, inspect.isclass)
        if issubclass(kind, exceptions.IdempotencyError) and kind is not exceptions.IdempotencyError
    ]
    found.sort(key=lambda kind: inspect.getsourcelines(kind)[1])
    return _table(
        ("exception", "meaning"), [(f"`{kind.__name__}`", _first(kind.__doc__)) for kind in found]
    )


def metrics_table() -> str:
    """Return every metric with its help text."""
    from prometheus_client import Counter, Histogram

    from idempotency.contrib import prometheus

    counted = [made for made in vars(prometheus).values() if isinstance(made, Counter | Histogram)]
    rows = [
        (
            _metric(family.name + ("_total" if family.type == "counter" else ""), made._labelnames),
            family.type,
            made._documentation,
        )
        for made in counted
        for family in made.describe()
    ]
    rows += [
        (_metric(family.name, family._labelnames), family.type, family.documentation)
        for family in prometheus.DatabaseCollector().collect()
    ]
    return _table(("metric", "kind", "meaning"), rows)


def _metric(name: str, labels: Iterable[str]) -> str:
    return f"`{name}" + (f"{{{', '.join(labels)}}}" if labels else "") + "`"


#: The generated parts by their name in the pages.
PARTS: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "credentials": credentials_list,
    "models": models_tables,
    "commands": commands_tables,
    "exceptions": errors_table,
    "metrics": metrics_table,
}
BEGINNING, END = r"<!-- made from the code: (\w+) -->\n", "<!-- end of it -->"
_PART = re.compile(f"({BEGINNING}).*?({END})", re.S)


def filled(page: str) -> str:
    """Return a page with its parts generated again."""
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", page)


def _comments(kind: type) -> dict[str, str]:
    """Return the ``#:`` comments above the fields of a dataclass."""
    lines, _ = inspect.getsourcelines(kind)
    tree = ast.parse("".join(lines))
    found = {}
    for node in tree.body[0].body:  # type: ignore[attr-defined]
        if not isinstance(node, ast.AnnAssign):
            continue
        at, said = node.lineno - 2, []
        while lines[at].strip().startswith("#:"):
            said.insert(0, lines[at].strip()[2:].strip())
            at -= 1
        if said:
            found[node.target.id] = _marked(" ".join(said))  # type: ignore[union-attr]
    return found


def _first(docstring: str | None) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return _marked(" ".join(inspect.cleandoc(docstring or "").split("\n\n")[0].split()))


def _marked(text: str) -> str:
    return text.replace("``", "`")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, LINE, break_long_words=False, break_on_hyphens=False)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def main() -> None:
    """Write the pages."""
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    import django
    from django.core.management import call_command

    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "rides_demo.settings",
        "DATABASE_URL": "sqlite://:memory:",
    }
    django.setup()
    call_command("migrate", verbosity=0)  # of a database in memory, which the metrics query
    main()
