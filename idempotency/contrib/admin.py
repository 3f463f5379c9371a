"""The state of the key in the admin of a model with a foreign key to it."""

from collections.abc import Iterable
from typing import Any

from django.contrib import admin
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Model
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from idempotency._states import KeyState
from idempotency.admin.key_page import short_state
from idempotency.admin.reading import admin_url
from idempotency.models import IdempotencyKey

_ATTRIBUTE = "_idempotency_key_state"
_NEEDED = ("finished_at", "refused_at", "stuck_at", "acknowledged_at", "last_run_at")


class KeyStateMixin:
    """Show the state of the key to which a row refers, such as "stuck for 9 min", in the list and
    on the page of the row.

    ::

        @admin.register(Order)
        class OrderAdmin(KeyStateMixin, admin.ModelAdmin):
            list_display = ("id", "created_at", "key_state")
            readonly_fields = ("key_state",)

    For users who may view keys, the state is a link to the page of the key. A list needs one more
    query, however many rows it has.

    ``key_field`` is the name of the foreign key. It must be set if the model has several foreign
    keys to ``IdempotencyKey``.
    """

    key_field = ""

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Return the list, with the states of all its keys, which are read together."""
        changelist = super().get_changelist_instance(request)  # type: ignore[misc]
        self._read_states(request, changelist.result_list)
        return changelist

    def get_object(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Return one row, with the state of its key."""
        row = super().get_object(request, *args, **kwargs)  # type: ignore[misc]
        self._read_states(request, [] if row is None else [row])
        return row

    @admin.display(description=_("state of the key"))
    def key_state(self, row: Model) -> str:
        """Return the state of the key as text or as a link; an empty text if there is no key or the
        key is deleted."""
        state: str = getattr(row, _ATTRIBUTE, "")
        return state

    def _read_states(self, request: HttpRequest, rows: Iterable[Any]) -> None:
        """Set the state on each row that refers to a key. ``rows`` must be the objects that the
        admin renders, not copies."""
        column = self._key_column()
        linked = [row for row in rows if getattr(row, column) is not None]
        for alias in {row._state.db for row in linked}:
            wanted = {getattr(row, column) for row in linked if row._state.db == alias}
            found: Any = (
                IdempotencyKey.objects.using(alias)
                .filter(pk__in=wanted)
                .with_state()
                .annotate(read_at=Now())
            )
            states = {key.pk: self._shown(request, key) for key in found.only(*_NEEDED)}
            for row in linked:
                if row._state.db == alias:
                    setattr(row, _ATTRIBUTE, states.get(getattr(row, column), ""))

    def _key_column(self) -> str:
        model = self.model  # type: ignore[attr-defined]
        fields = [
            field for field in model._meta.concrete_fields if field.related_model is IdempotencyKey
        ]
        fields = [field for field in fields if self.key_field in ("", field.name)]
        if len(fields) != 1:
            raise ImproperlyConfigured(
                f"{type(self).__name__}.key_field must name the foreign key of {model.__name__} to"
                f" IdempotencyKey: there are {len(fields)}."
            )
        return str(fields[0].attname)

    def _shown(self, request: HttpRequest, key: Any) -> str:
        url = admin_url(self.admin_site, request, IdempotencyKey, key.pk)  # type: ignore[attr-defined]
        state = short_state(key)
        text = format_html("<strong>{}</strong>", state) if key.state == KeyState.STUCK else state
        return format_html('<a href="{}">{}</a>', url, text) if url else text
