"""Leave room on each page of keys, so that a key's updates stay on its page (HOT) and touch no index."""

from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps


def set_fillfactor(apps: StateApps, schema_editor: BaseDatabaseSchemaEditor) -> None:
    """Set it on PostgreSQL; SQLite has no such thing."""
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute("ALTER TABLE idempotency_idempotencykey SET (fillfactor = 70)")


class Migration(migrations.Migration):
    dependencies = [("idempotency", "0001_initial")]

    operations = [migrations.RunPython(set_fillfactor, migrations.RunPython.noop, elidable=False)]
