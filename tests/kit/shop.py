"""A phased view whose second phase can fail or be held at a gate."""

import json
from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.urls import reverse
from django.utils import translation
from django.views.decorators.http import require_POST

from idempotency.decorators import idempotent
from idempotency.phases import atomic_phase
from tests.kit.threads import Gate
from tests.models import Entry


class Shop:
    """A phased view that fails between its phases while ``broken``, and records the request of each
    run."""

    def __init__(self) -> None:
        self.broken = True
        self.seen: list[dict[str, Any]] = []
        self.gate: Gate | None = None
        self.view = require_POST(
            login_required(idempotent(recovery_points=["entry_created"])(self._view))
        )

    def _view(self, request: HttpRequest, number: int = 0) -> HttpResponseBase:
        key = request.idempotency_key
        for recovery_point in key.phases():
            if recovery_point == "started":
                with atomic_phase(key) as phase:
                    Entry.objects.create(name="entry", idempotency_key=key)
                    phase.set_recovery_point("entry_created")
                continue
            self.seen.append(
                {
                    "user": request.user.pk,
                    "body": (
                        json.loads(request.body)
                        if request.content_type == "application/json"
                        else request.POST.dict()
                    ),
                    "query": request.GET.dict(),
                    "host": request.get_host(),
                    "port": request.get_port(),
                    "address": request.META["REMOTE_ADDR"],
                    "receipt": request.build_absolute_uri(reverse("view")),
                    "language": translation.get_language(),
                    "derived": key.derive("charge"),
                }
            )
            if self.gate:
                self.gate.wait_here()
            if self.broken:
                raise OSError("Stripe is down")
            with atomic_phase(key) as phase:
                phase.set_response(
                    JsonResponse({"entry": Entry.objects.get(idempotency_key=key).pk}, status=201)
                )
        return key.response()


def open_shop(serve: Any) -> Shop:
    """Return a shop that is served at /view/."""
    shop = Shop()
    serve(view=shop.view)
    return shop
