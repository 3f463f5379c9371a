from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("idempotency", "0005_handed_back_at"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AddField(
            model_name="idempotencykey",
            name="untouched_attempts",
            field=models.PositiveIntegerField(
                db_default=0,
                default=0,
                help_text="While it equals attempts, no attempt is known to have begun anything.",
            ),
        ),
        migrations.AddField(
            model_name="idempotencykey",
            name="call_begun_at",
            field=models.DateTimeField(blank=True, help_text="When the last key.call() was entered.", null=True),
        ),
        migrations.AddField(
            model_name="idempotencykey",
            name="refused_at",
            field=models.DateTimeField(
                blank=True,
                help_text="When the client was refused with a status that is never stored; each claim clears it.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="idempotencykey",
            name="refused",
            field=models.GeneratedField(
                db_persist=True,
                expression=models.Q(("refused_at__isnull", False), ("untouched_attempts", models.F("attempts"))),  # type: ignore[arg-type]  # a Q is one
                help_text="Refused before any attempt had begun anything: only a retry of the client runs it.",
                output_field=models.BooleanField(),
            ),
        ),
        migrations.AddConstraint(
            model_name="idempotencykey",
            constraint=models.CheckConstraint(
                condition=models.Q(("untouched_attempts__lte", models.F("attempts"))),
                name="idempotency_key_untouched_attempts",
            ),
        ),
        migrations.RemoveIndex(
            model_name="idempotencykey",
            name="idempotency_key_unfinished",
        ),
        migrations.AddIndex(
            model_name="idempotencykey",
            index=models.Index(
                condition=models.Q(("finished_at__isnull", True), ("refused", False)),
                fields=["created_at"],
                name="idempotency_key_unfinished",
            ),
        ),
    ]
