"""The test runner: it makes the migrations of the project, whose models depend on the
configuration."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from django.core.management import call_command
from django.db import connections
from django.test.runner import DiscoverRunner

#: The packages of the migrations, in a folder that ends with the process.
MIGRATIONS = {app: f"migrations_of_{app}_{os.getpid()}" for app in ("users", "shop")}


class Runner(DiscoverRunner):
    """Make the migrations, and then run the tests."""

    def setup_databases(self, **kwargs: Any) -> Any:
        """Write the migrations to a temporary folder, and create the databases with them."""
        with tempfile.TemporaryDirectory() as folder:
            for name in MIGRATIONS.values():
                package = Path(folder) / name
                package.mkdir()
                (package / "__init__.py").touch()
            sys.path.insert(0, folder)
            call_command("makemigrations", *MIGRATIONS, verbosity=0)
            for connection in connections.all():
                connection.close()
                # A pool would keep the name of the database.
                if hasattr(connection, "close_pool"):
                    connection.close_pool()
                if hasattr(connection, "closeall"):  # of django-db-geventpool
                    connection.closeall()
                    connection._connection_pools.clear()
                    connection._pool = None
            return super().setup_databases(**kwargs)
