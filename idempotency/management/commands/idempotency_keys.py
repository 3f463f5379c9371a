"""``manage.py idempotency_keys``: list keys, show one, and intervene as in the admin."""

import argparse
import getpass
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import F
from django.http import HttpResponse

from idempotency import interventions
from idempotency._operations.definition import METHOD
from idempotency._states import IdempotencyKeyQuerySet, KeyState, before_now
from idempotency._text import escaped
from idempotency.exceptions import Rejected
from idempotency.management.failures import exit_1_explained, refuse_second_alias
from idempotency.management.passes import add_database_argument, database_of, whole_number
from idempotency.models import DownstreamCall, IdempotencyKey

_STATES = {state.value.replace(" ", "-"): state for state in KeyState}
#: The fields that ``show`` prints. The key, the seed, the token, the headers and the bodies are
#: secrets.
_SHOWN = (
    "scope", "user_id", "request_method", "request_path", "remote_addr", "recovery_point",
    "attempts", "completer_attempts", "created_at", "last_run_at", "next_run_at", "locked_until",
    "stuck_at", "stuck_code", "stuck_reason", "last_error", "acknowledged_at", "handed_back_at",
    "refused_at", "finished_at", "expires_at", "response_code", "history",
)  # fmt: skip
_COMPLETE = "Run requests and operations now, each from its last recovery point."
_ANSWER = "Finish keys with a response or a result of yours, which each retry then gets."
_RELEASE = "Release the locks of keys, as if their leases had ended."
_ACKNOWLEDGE = "Take stuck keys off the list of keys for review."
_UNACKNOWLEDGE = "Put acknowledged keys back on the list of keys for review."
#: Each action: its help, the word of its result, and the function of ``interventions``.
_ACTIONS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "complete": (_COMPLETE, "completed", interventions.complete_now),
    "answer": (_ANSWER, "answered", interventions.answer),
    "release": (_RELEASE, "released", interventions.release_lock),
    "hand-back": ("Hand keys back to the completer.", "handed back", interventions.hand_back),
    "acknowledge": (_ACKNOWLEDGE, "acknowledged", interventions.acknowledge),
    "unacknowledge": (_UNACKNOWLEDGE, "on the list again", interventions.unacknowledge),
}


class Command(BaseCommand):
    help = (
        "List idempotency keys, show one, or do the action of a button of the admin. The list"
        " begins with the keys for manual review. The output contains no secret of a client. Exit"
        " status: 0 if done; 1 if the database cannot be reached, or if a key is missing or was"
        " not changed; 2 for wrong usage. A key is not changed if a run or another operator has"
        " changed it, or if its state does not permit the action."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        common = argparse.ArgumentParser(add_help=False)
        add_database_argument(common)
        actions = parser.add_subparsers(
            dest="action", required=True, parser_class=argparse.ArgumentParser
        )
        text = "Print a line for each key: id, state, code, method and path or operation, error."
        add = actions.add_parser("list", parents=[common, _filters()], help=text).add_argument
        text = "Maximum number of lines (default: %(default)s)."
        add("--limit", type=whole_number, default=100, metavar="N", help=text)
        add("--json", action="store_true", help="Print JSON.")
        text = "Print what is known of one key, and its calls."
        add = actions.add_parser("show", parents=[common], help=text).add_argument
        add("ids", nargs=1, type=int, metavar="ID", help="The id of the key.")
        add("--json", action="store_true", help="Print JSON.")
        for name, (text, _, _) in _ACTIONS.items():
            add = actions.add_parser(name, parents=[common, _filters()], help=text).add_argument
            add("ids", nargs="*", default=[], type=int, metavar="ID", help="The ids of the keys.")
            text = "All keys that the filters select, instead of ids."
            add("--all", action="store_true", help=text)
            add("--yes", action="store_true", help="Do not ask for a confirmation.")
            text = "Your name, for the history (default: that of the system user)."
            add("--by", metavar="NAME", help=text)
            add("--note", default="", metavar="TEXT", help="Your finding, for the history.")
            if name == "answer":
                _add_answer(add)

    def handle(self, *args: Any, **options: Any) -> None:
        options["database"] = using = database_of(options)
        if options["action"] == "complete":  # The only one that runs code of the project.
            refuse_second_alias("idempotency_keys", using)
        with exit_1_explained("idempotency_keys", using):
            run = {"list": self._list, "show": self._show}.get(options["action"], self._intervene)
            run(IdempotencyKeyQuerySet(IdempotencyKey, using=using), options)

    def _list(self, keys: IdempotencyKeyQuerySet, options: dict[str, Any]) -> None:
        found = list(_filtered(keys, options)[: options["limit"]])
        if options["json"]:
            self.stdout.write(_json([_described(key) for key in found]))
            return
        for key in found:
            self.stdout.write(_line(key))

    def _show(self, keys: IdempotencyKeyQuerySet, options: dict[str, Any]) -> None:
        (key,) = self._chosen(keys, options)
        calls = DownstreamCall.objects.using(options["database"]).filter(key_id=key.pk)
        values = calls.order_by("started_at").values("name", "started_at", "recorded_at")
        described = _described(key) | {"calls": list(values)}
        if options["json"]:
            self.stdout.write(_json(described))
            return
        for name, value in described.items():
            if value not in (None, "", []):
                text = value if isinstance(value, str) else _json(value)
                self.stdout.write(f"{name}: {escaped(text)}")

    def _intervene(self, keys: IdempotencyKeyQuerySet, options: dict[str, Any]) -> None:
        text, done, act = _ACTIONS[options["action"]]
        chosen = self._chosen(keys, options)
        given: dict[str, Any] = {}
        if options["action"] == "answer":
            given = {"response": _answer(options)}
            for key in chosen:
                _refuse_answer(key, given["response"])
        prepared = [_prepared(act, key, given, options) for key in chosen]
        self._confirm(text, chosen, options)
        changed = sum(self._act(key, action) for key, action in zip(chosen, prepared, strict=True))
        self.stdout.write(f"idempotency_keys: {changed} {done}")
        if left := len(chosen) - changed:
            raise CommandError(
                f"idempotency_keys: {left} not changed: a run or another operator has changed them,"
                " or their state does not permit the action (see idempotency_keys show).",
                returncode=1,
            )

    def _act(self, key: IdempotencyKey, action: Callable[[], Any]) -> bool:
        result = action()
        if isinstance(result, str):  # that of a run
            self.stdout.write(f"{key.pk}: {result}")
        return bool(result)

    def _chosen(
        self, keys: IdempotencyKeyQuerySet, options: dict[str, Any]
    ) -> list[IdempotencyKey]:
        """Return the keys of the action. Raises CommandError if an id is unknown, and for neither
        or both of ids and --all."""
        ids = options["ids"]
        if bool(ids) == bool(options.get("all")):
            raise CommandError("Give the ids of the keys, or --all with filters.", returncode=2)
        if not ids:
            return list(_filtered(keys, options))
        filters = ("state", "code", "path", "user", "min_age")
        if any(options.get(name) is not None for name in filters):
            text = "Filters select keys for --all; they do not apply to ids."
            raise CommandError(text, returncode=2)
        found = list(keys.with_state().filter(pk__in=ids).order_by("pk"))
        if missing := set(ids) - {key.pk for key in found}:
            raise CommandError(f"idempotency_keys: no key has the id {min(missing)}.", returncode=1)
        return found

    def _confirm(self, text: str, chosen: list[IdempotencyKey], options: dict[str, Any]) -> None:
        """Ask before anything changes. Raises CommandError if the answer is no, or if nobody can
        answer."""
        if options["yes"] or not chosen:
            return
        if not sys.stdin.isatty():
            error = "idempotency_keys: this is no terminal: confirm with --yes."
            raise CommandError(error, returncode=2)
        for key in chosen[:20]:
            self.stdout.write(_line(key))
        if len(chosen) > 20:
            self.stdout.write(f"... and {len(chosen) - 20} more")
        answer = input(f"{text} {len(chosen)} in all. Continue? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            raise CommandError("idempotency_keys: nothing was changed.", returncode=1)


def _filters() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument_group("filters").add_argument
    add("--state", choices=tuple(_STATES), help="The state of the keys.")
    add("--code", help="The stuck code.")
    add("--path", metavar="TEXT", help="A part of the path, or of the name of an operation.")
    add("--user", metavar="NAME", help="The user name, or the primary key of the user.")
    add("--min-age", type=int, metavar="SECONDS", help="Keys that are at least this old.")
    return parser


def _filtered(keys: IdempotencyKeyQuerySet, options: dict[str, Any]) -> IdempotencyKeyQuerySet:
    """Return the keys that the filters select, each with its state, those for manual review
    first."""
    if options["state"]:
        keys = keys.in_state(_STATES[options["state"]])
    if options["code"]:
        keys = keys.filter(stuck_code=options["code"])
    if options["path"]:
        keys = keys.filter(request_path__contains=options["path"])
    if options["user"] is not None:
        keys = keys.filter(user_id=_user(options["user"]))
    if options["min_age"]:
        keys = keys.filter(created_at__lt=before_now(options["min_age"]))
    return keys.with_state().order_by(F("stuck_at").asc(nulls_last=True), "created_at", "pk")


def _user(name: str) -> Any:
    """Return the primary key of the user. Raises CommandError if there is no such user."""
    model = get_user_model()
    users = model._default_manager.filter(**{model.USERNAME_FIELD: name})
    pk = users.values_list("pk", flat=True).first()
    try:
        return pk if pk is not None else model._meta.pk.to_python(name)
    except Exception:
        raise CommandError(f"idempotency_keys: no user is named {name!r}.", returncode=1) from None


def _add_answer(add: Callable[..., Any]) -> None:
    text = "The status for the client of a request: a 2xx or a 4xx."
    add("--status", type=int, metavar="CODE", help=text)
    text = "The body; @FILE reads it from a file."
    add("--body", default="", metavar="TEXT", help=text)
    text = "The type of the body (default: %(default)s)."
    add("--content-type", default="application/json", metavar="TYPE", help=text)
    text = "The result of an operation; @FILE reads it from a file."
    add("--result", metavar="JSON", help=text)
    text = "The code with which an operation is rejected."
    add("--rejected", metavar="CODE", help=text)
    add("--message", default="", metavar="TEXT", help="The message for --rejected.")


def _answer(options: dict[str, Any]) -> Any:
    """Return the response to a request, or the result or the refusal of an operation. Raises
    CommandError for none or several of them, and for invalid JSON."""
    given = [options[name] is not None for name in ("status", "result", "rejected")]
    if sum(given) != 1:
        text = "idempotency_keys: give one of --status, --result and --rejected."
        raise CommandError(text, returncode=2)
    if options["rejected"] is not None:
        return Rejected(options["rejected"], options["message"])
    text = options["body"] if options["result"] is None else options["result"]
    content = Path(text[1:]).read_bytes() if text.startswith("@") else text.encode()
    if options["result"] is None:
        return HttpResponse(content, status=options["status"], content_type=options["content_type"])
    try:
        return json.loads(content)
    except ValueError as error:
        raise CommandError(
            f"idempotency_keys: --result is no JSON: {error}", returncode=2
        ) from None


def _refuse_answer(key: IdempotencyKey, answer: Any) -> None:
    """Raise CommandError if the answer cannot finish the key."""
    is_operation = key.request_method == METHOD
    problem = interventions.answer_problem(answer, key=key)
    if isinstance(answer, HttpResponse) == is_operation:
        kind = "an operation: give --result or" if is_operation else "a request: give"
        problem = f"it is the key of {kind} {'--rejected' if is_operation else '--status'}."
    if problem:
        raise CommandError(f"idempotency_keys: key {key.pk}: {problem}", returncode=2)


def _prepared(
    act: Callable[..., Any],
    key: IdempotencyKey,
    given: dict[str, Any],
    options: dict[str, Any],
) -> Callable[[], Any]:
    """Return the action on a key, in the state that the operator sees. A later run, phase or call
    prevents it."""
    using, by = options["database"], options["by"] or _system_user()
    shared = {"at": key.recovery_point, "note": options["note"], "using": using, "by": by}
    if given:
        shared |= given | {"calls": interventions.calls_of(key.pk, using=using)}
    return partial(act, key.pk, key.claim_token, **shared)


def _system_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for its user
        return "unknown"


def _described(key: IdempotencyKey) -> dict[str, Any]:
    return {"id": key.pk, "state": key.state} | {name: getattr(key, name) for name in _SHOWN}  # type: ignore[attr-defined]


def _line(key: IdempotencyKey) -> str:
    method = "operation" if key.request_method == METHOD else key.request_method
    error = " ".join((key.stuck_reason or key.last_error).split())[:120]
    shown = (str(key.pk), key.state, key.stuck_code, method, key.request_path[:120], error)  # type: ignore[attr-defined]
    return escaped("  ".join(filter(None, shown)))


def _json(value: Any) -> str:
    return json.dumps(value, cls=DjangoJSONEncoder)
