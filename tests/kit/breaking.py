"""Code of a project that breaks the open transaction and hides the error."""

from contextlib import suppress

import pytest
from django.db import DatabaseError, connection, connections

from rides_demo.models import User
from tests.factories import UserFactory


def break_with_write(**kwargs):
    """Break the open transaction, and catch the error."""
    with suppress(DatabaseError):
        name = User.objects.values_list("username", flat=True).first() or UserFactory().username
        UserFactory(username=name)


def break_with_read(**kwargs):
    """Break the transaction of the server alone: Django does not note the error of a read."""
    with suppress(DatabaseError), connection.cursor() as cursor:
        cursor.execute("SELECT 1/0")


#: Parameters of a test: the ways in which code of a project breaks a transaction.
BREAKS = [break_with_write, pytest.param(break_with_read, marks=pytest.mark.postgres)]


def breaks_behind(statement, break_transaction, using="default"):
    """Return a context in which a wrapper breaks the transaction once, behind this statement."""
    left = [1]

    def wrapper(execute, sql, *arguments):
        result = execute(sql, *arguments)
        if statement in sql and left:
            left.clear()
            break_transaction()
        return result

    return connections[using].execute_wrapper(wrapper)
