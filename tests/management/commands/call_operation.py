"""A command that calls an operation, as a scheduler starts one."""

import json
from typing import Any

from django.core.management import BaseCommand, CommandError, CommandParser

from idempotency.exceptions import IdempotencyError
from tests import operations


class Command(BaseCommand):
    """Call an operation of the tests, and print its result."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name")
        parser.add_argument("key")
        parser.add_argument("arguments", help="the arguments of the operation, as JSON")

    def handle(self, *args: Any, name: str, key: str, arguments: str, **options: Any) -> str:
        operation = getattr(operations, name)
        try:
            return json.dumps(operation.once(key, **json.loads(arguments)))
        except IdempotencyError as error:
            raise CommandError(f"{type(error).__name__}: {error}") from error
