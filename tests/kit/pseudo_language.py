"""A language with only Cyrillic letters: a text in Latin letters on a page is data, or is not
translatable."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from gettext import GNUTranslations
from html.parser import HTMLParser
from pathlib import Path
from string import ascii_letters
from typing import Any

import django
from django.utils import translation

from tests import catalogue
from tests.catalogue import Message

LANGUAGE = "xx"
_CYRILLIC = "абвгдежзиклмнопрстуфхцчшэя"
_DISGUISE = str.maketrans(ascii_letters, _CYRILLIC + _CYRILLIC.upper())
#: Placeholders, tags and entities of a message, which are not changed.
_KEPT = re.compile(r"(%\(\w+\)[sd]|%[sd]|\{\w+\}|<[^>]+>|&\w+;)")
#: The attributes that are shown or read aloud. The attributes that begin with ``data-`` are the
#: texts of the scripts.
_ATTRIBUTES = re.compile(
    r"title|alt|placeholder|aria-label|data-(done|failed|pause|paused|resume|signed-out|unreachable)"
)
_SILENT = ("script", "style")
_VOID = ("area", "base", "br", "col", "hr", "img", "input", "link", "meta", "path", "rect", "line")


@contextmanager
def pseudo_language(folder: Path, settings: Any) -> Iterator[None]:
    """Activate the language during the block. It has the messages of our catalogue, and of Django's
    German catalogue."""
    place = folder / LANGUAGE / "LC_MESSAGES"
    place.mkdir(parents=True, exist_ok=True)
    (place / "django.mo").write_bytes(_compiled())
    settings.LOCALE_PATHS = [str(folder)]
    with translation.override(LANGUAGE):
        yield


def disguised(text: str) -> str:
    """Return a text in the language."""
    return "".join(
        part if number % 2 else part.translate(_DISGUISE)
        for number, part in enumerate(_KEPT.split(text))
    )


@cache
def _compiled() -> bytes:
    ours = catalogue.read(catalogue.PO.read_text())
    header = ours.pop(Message())
    messages = [*ours, *_of_django()]
    entries = {each: [disguised(text) for text in each[1:] if text] for each in messages}
    return catalogue.compiled({Message(): header} | entries)


def _of_django() -> Iterator[Message]:
    """Yield the messages of Django. The singular is also used as plural, because a compiled
    catalogue lacks the plural."""
    for path in Path(django.__file__).parent.rglob("locale/de/LC_MESSAGES/django.mo"):
        with path.open("rb") as file:
            known: dict[Any, str] = GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        for key in known:
            context, _, text = (key[0] if isinstance(key, tuple) else key).rpartition("\x04")
            if text:
                yield Message(context, text, text if isinstance(key, tuple) else "")


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._open: list[tuple[str, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        silent = (
            tag in _SILENT
            or given.get("id") == "nav-sidebar"
            or any(hidden for _, hidden in self._open)
        )
        if not silent:
            self.texts += [value or "" for name, value in attrs if _ATTRIBUTES.fullmatch(name)]
            if tag == "input" and given.get("type") == "submit":
                self.texts.append(given.get("value") or "")
        if tag not in _VOID:
            self._open.append((tag, silent))

    def handle_endtag(self, tag: str) -> None:
        while self._open and tag not in _VOID:
            if self._open.pop()[0] == tag:
                break

    def handle_data(self, data: str) -> None:
        if not any(hidden for _, hidden in self._open):
            self.texts.append(data)


def texts_of(page: str) -> list[str]:
    """Return the texts of a page that are shown or read aloud, with some attributes, without the
    sidebar's list of apps."""
    reader = _Reader()
    reader.feed(page)
    return [" ".join(text.split()) for text in reader.texts if text.strip()]


def latin_words(page: str) -> dict[str, str]:
    """Return the words in Latin letters that a page shows, each with a text that contains it."""
    return {
        word: text for text in texts_of(page) for word in re.findall(r"[A-Za-z][\w.@'-]*", text)
    }
