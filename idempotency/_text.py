"""Make text safe for logs and for both databases."""

from traceback import walk_tb

_MAX_ERROR_LENGTH = 2000
_MAX_SUMMARY_LENGTH = 200


def error_text(error: BaseException, *, withheld: bool = False) -> str:
    """Return the type and message of an exception, to be stored and logged. If ``withheld``, parts of the request must not be
    stored. The message could quote them, so the line of code replaces it."""
    if not withheld:
        return f"{type(error).__name__}: {error}"
    *_, place = ["nowhere", *(f"{frame.f_globals.get('__name__')}:{line}" for frame, line in walk_tb(error.__traceback__))]
    return f"{type(error).__name__} in {place}"


def storable(text: str) -> str:
    """Return ``text`` without NUL and lone surrogates, which the databases reject, and at most 2,000 characters long."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode()[:_MAX_ERROR_LENGTH] or "No reason was given."


def summary(text: str) -> str:
    """Return the first line of ``text``, at most 200 characters, for the history of a key."""
    return storable(text).partition("\n")[0][:_MAX_SUMMARY_LENGTH]


def printable(text: str) -> str:
    return text if text.isprintable() else "".join(filter(str.isprintable, text))


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
