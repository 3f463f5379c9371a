"""The German texts of the app: the messages of the code and the messages of the catalogue.

``python -m tests.catalogue`` adds new messages to ``django.po`` with an empty translation, removes
messages that the code no longer has, and writes ``django.mo``. It needs only Python.
"""

# ruff: noqa: T201 - it prints what is not translated

import ast
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from django.utils.translation.template import templatize

APP = Path(__file__).parents[1] / "idempotency"
PO = APP / "locale" / "de" / "LC_MESSAGES" / "django.po"
#: Pages for the clients of the API, not for users of the admin.
NOT_TRANSLATED = ("templates/idempotency/problem.html",)
#: Messages that Django's admin already has in each of its languages.
OF_DJANGO = frozenset(
    {
        " By %(filter_title)s ",
        "All",
        "%(counter)s result",
        "Empty",
        "Filter",
        "Home",
        "Search",
        "name",
        "user",
    }
)
#: The arguments of the functions that mark a message: context, text and plural of the message.
_MARKS = {
    **dict.fromkeys(("_", "gettext", "gettext_lazy", "gettext_noop"), ("text",)),
    **dict.fromkeys(("ngettext", "ngettext_lazy"), ("text", "plural")),
    **dict.fromkeys(("pgettext", "pgettext_lazy"), ("context", "text")),
    **dict.fromkeys(("npgettext", "npgettext_lazy"), ("context", "text", "plural")),
}
_LITERAL = r"""u?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_CALL = re.compile(rf"\b({'|'.join(_MARKS)})\(((?:{_LITERAL}(?:,\s*)?)+)(?:count)?\)")


class Message(NamedTuple):
    """The key of a translation in the catalogue; ``plural`` is empty if there is only one form."""

    context: str = ""
    text: str = ""
    plural: str = ""


def used() -> dict[Message, list[str]]:
    """Return the messages of the code and the templates, each with its files, except the messages
    of Django."""
    found: dict[Message, list[str]] = {}
    for pattern, messages_of in (("*.py", _of_code), ("*.html", _of_template)):
        for path in sorted(APP.rglob(pattern)):
            name = path.relative_to(APP).as_posix()
            for message in messages_of(path.read_text()) if name not in NOT_TRANSLATED else ():
                if message.text not in OF_DJANGO and name not in found.setdefault(message, []):
                    found[message].append(name)
    return found


def _of_code(source: str) -> Iterator[Message]:
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in _MARKS
        ):
            names = _MARKS[node.func.id]
            values = [
                ast.literal_eval(value)
                for value in node.args[: len(names)]
                if isinstance(value, ast.Constant)
            ]
            if len(values) == len(names):  # Otherwise the message is marked elsewhere.
                yield Message(**dict(zip(names, values, strict=True)))


def _of_template(source: str) -> Iterator[Message]:
    for name, values in _CALL.findall(templatize(source)):
        texts = ast.literal_eval(f"[{values}]")
        yield Message(**dict(zip(_MARKS[name], texts, strict=True)))


def read(text: str) -> dict[Message, list[str]]:
    """Return the messages of a .po file with their translations, one for each form. The first entry
    is the header."""
    entries: dict[Message, list[str]] = {}
    for block in text.split("\n\n"):
        fields: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line.startswith("#") or not line:
                continue
            if not line.startswith('"'):
                name, _, line = line.partition(" ")
            fields[name] = fields.get(name, "") + ast.literal_eval(line)
        if fields:
            forms = [value for field, value in fields.items() if field.startswith("msgstr")]
            message = Message(
                fields.get("msgctxt", ""), fields["msgid"], fields.get("msgid_plural", "")
            )
            if message in entries:
                raise ValueError(f"twice in the catalogue: {message}")
            entries[message] = forms
    return entries


def compiled(entries: dict[Message, list[str]]) -> bytes:
    """Return the .mo file: a table of the sorted messages, a table of the translations, the
    texts."""
    texts = sorted((_key(message), "\0".join(forms).encode()) for message, forms in entries.items())
    begin = 7 * 4 + 2 * 8 * len(texts)
    tables, data = [], b""
    for column in (0, 1):
        for pair in texts:
            tables += [len(pair[column]), begin + len(data)]
            data += pair[column] + b"\0"
    header = (0x950412DE, 0, len(texts), 7 * 4, 7 * 4 + 8 * len(texts), 0, 0)
    return struct.pack(f"<{7 + len(tables)}I", *header, *tables) + data


def _key(message: Message) -> bytes:
    context = f"{message.context}\x04" if message.context else ""
    plural = f"\0{message.plural}" if message.plural else ""
    return f"{context}{message.text}{plural}".encode()


def _written(message: Message, forms: list[str], files: list[str]) -> str:
    lines = [f"#: {name}" for name in files]
    if "%(" in message.text + message.plural:
        lines.append("#, python-format")
    lines += [f"msgctxt {_quoted(message.context)}"] if message.context else []
    lines.append(f"msgid {_quoted(message.text)}")
    if not message.plural:
        return "\n".join([*lines, f"msgstr {_quoted(forms[0])}"])
    lines.append(f"msgid_plural {_quoted(message.plural)}")
    return "\n".join(
        lines + [f"msgstr[{number}] {_quoted(form)}" for number, form in enumerate(forms)]
    )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def main() -> int:
    """Write both files; return 1 if a message has no translation, 0 otherwise."""
    text = PO.read_text()
    header, known = text.split("\n\n")[0], read(text)
    files = used()
    messages = {
        message: known.get(message) or [""] * (2 if message.plural else 1) for message in files
    }
    blocks = [_written(message, forms, files[message]) for message, forms in messages.items()]
    PO.write_text("\n\n".join([header, *blocks]) + "\n")
    PO.with_suffix(".mo").write_bytes(compiled(read(PO.read_text())))
    missing = [message.text for message, forms in messages.items() if not all(forms)]
    print(
        "\n".join(
            [*(f"not translated: {text}" for text in missing), f"{len(messages)} messages in {PO}"]
        )
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
