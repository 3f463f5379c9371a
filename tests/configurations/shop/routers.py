"""The routers of the project."""

from typing import Any

from tests.configurations.shop.models import Elsewhere


class TwoDatabases:
    """Send one model to the second database."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        """Read where the model is written."""
        return "other" if model is Elsewhere else None

    db_for_write = db_for_read

    def allow_migrate(
        self, db: str, app_label: str, model_name: str | None = None, **hints: Any
    ) -> bool:
        """Create the tables of this app in the default database only, and of the model in the
        second one only."""
        return (model_name == "elsewhere") == (db == "other")


class ReadsFromReplica:
    """Read from an alias of its own, as with a replica."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        """Read from the replica."""
        return "replica"

    def db_for_write(self, model: Any, **hints: Any) -> str:
        """Write to the default database."""
        return "default"

    def allow_relation(self, first: Any, second: Any, **hints: Any) -> bool:
        """Rows of both aliases are rows of one database."""
        return True

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        """Create no tables through the replica."""
        return db == "default"
