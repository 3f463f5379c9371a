"""``manage.py consume_jobs``: run the jobs of the broker of ``BROKER``, until it is lost."""

from importlib import import_module

from django.conf import settings
from django.core.management.base import BaseCommand


class Command(BaseCommand):
    help = "Run the jobs of RabbitMQ or Kafka (BROKER), until the broker is lost."

    def handle(self, **options: object) -> None:
        import_module(f"rides_demo.brokers.{settings.BROKER}").consume()
