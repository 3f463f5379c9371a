"""The call stack, for errors whose cause is outside a view."""

import sys
from types import FrameType

#: Packages whose functions may stand between the cause and this app.
_BETWEEN = sys.stdlib_module_names | {"idempotency", "django", "asgiref", "rest_framework", "ninja"}
#: The module from which the server calls a request, and outside of which no function belongs to it.
_HANDLERS = ("django.core.handlers.wsgi", "django.core.handlers.asgi", "django.test.client")


def nearest_function() -> str:
    """Return a sentence with the nearest function of the project or of another package on the
    stack; empty if this thread has none. It is a hint, because another function further out may be
    the cause."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (module := str(frame.f_globals.get("__name__"))) not in _HANDLERS:
        if module.partition(".")[0] not in _BETWEEN:
            name = frame.f_code.co_qualname.partition(".<locals>")[0]
            return f"The nearest function outside Django on the stack is {module}.{name}."
        frame = frame.f_back
    return ""
