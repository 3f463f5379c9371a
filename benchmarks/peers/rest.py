"""Common code of the peers on Django REST Framework: a user without a query, and the bare view in
the framework."""

from typing import Any

from django.contrib.auth import get_user_model
from rest_framework.authentication import BaseAuthentication
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from benchmarks.peers.around import work

USER_ID = 1


class OneUser(BaseAuthentication):
    """Authenticate every request as the same user; a peer may refer to the row of this user."""

    def authenticate(self, request: Request) -> tuple[Any, None]:
        """Return the user without a query."""
        return get_user_model()(pk=USER_ID), None


def create_user() -> None:
    """Create the row of the user."""
    get_user_model().objects.get_or_create(
        pk=USER_ID, defaults={"username": "bench", "email": "bench@rocketrides.example"}
    )


class View(APIView):
    """The bare view: only JSON, and no optional parts of the framework."""

    authentication_classes = [OneUser]
    permission_classes = []
    renderer_classes = [JSONRenderer]

    def post(self, request: Request) -> Response:
        """Do the work."""
        return Response(work(), status=201)


bare = View.as_view()
