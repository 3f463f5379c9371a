"""Retries of requests that remove what their authentication or permission reads, as the page of DRF
describes them."""

from collections.abc import Callable
from typing import Any

import pytest
from rest_framework import generics, serializers
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.permissions import BasePermission
from rest_framework.response import Response
from rest_framework.test import APIClient
from rest_framework.views import APIView

from idempotency.decorators import idempotent
from tests.models import Account, Entry

Serve = Callable[..., None]
pytestmark = pytest.mark.django_db(transaction=True)
KEY = {"Idempotency-Key": "key-1"}


def one(request: Any) -> str:
    """Return one scope for all."""
    return "one"


class Accounts(serializers.ModelSerializer):
    """The fields of an account."""

    class Meta:
        model = Account
        fields = ["name"]


class Delete(generics.DestroyAPIView):
    """Reads the row inside the handler."""

    queryset = Account.objects.all()
    serializer_class = Accounts
    lookup_field = "name"

    @idempotent(scope=one)
    def delete(self, request: Any, *args: Any, **kwargs: Any) -> Response:
        """Delete the account."""
        Entry.objects.create(name="deleted")
        return super().delete(request, *args, **kwargs)


class Owns(BasePermission):
    """Reads the row before the handler."""

    def has_permission(self, request: Any, view: Any) -> bool:
        """Look for the account."""
        return Account.objects.filter(**view.kwargs).exists()


@pytest.mark.parametrize(("permissions", "again"), [([], 204), ([Owns], 403)])
def test_a_retry_of_a_delete(permissions: list[Any], again: int, serve: Serve) -> None:
    view = Delete.as_view(permission_classes=permissions)
    serve(view=lambda request: view(request, name="purse"))
    Account.objects.create(name="purse")
    responses = [APIClient().delete("/view/", headers=KEY) for _ in range(2)]
    assert [response.status_code for response in responses] == [204, again]
    assert Entry.objects.count() == 1


class Token(BaseAuthentication):
    """A row is a token. With ``revoked``, a revoked one is accepted."""

    revoked = False

    def authenticate(self, request: Any) -> tuple[Any, Any]:
        """Look for the token."""
        if not Account.objects.filter(
            name="token", **({} if self.revoked else {"balance": 1})
        ).exists():
            raise AuthenticationFailed
        return None, "token"

    def authenticate_header(self, request: Any) -> str:
        """Ask for a token."""
        return "Bearer"


class EvenRevoked(Token):
    """For the view that revokes."""

    revoked = True


@pytest.mark.parametrize(("authentication", "again"), [(Token, 401), (EvenRevoked, 204)])
def test_a_retry_of_revoke_my_token(authentication: Any, again: int, serve: Serve) -> None:
    class Revoke(APIView):
        authentication_classes = [authentication]

        @idempotent(scope=one)
        def post(self, request: Any) -> Response:
            Account.objects.update(balance=0)
            Entry.objects.create(name="revoked")
            return Response(status=204)

    serve(view=Revoke.as_view())
    Account.objects.create(name="token", balance=1)
    assert [APIClient().post("/view/", headers=KEY).status_code for _ in range(2)] == [204, again]
    assert Entry.objects.count() == 1
