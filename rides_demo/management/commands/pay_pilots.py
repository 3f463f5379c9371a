"""``manage.py pay_pilots --day YYYY-MM-DD``: pay each pilot what the rides of a day have earned."""

from argparse import ArgumentTypeError
from datetime import UTC, date, datetime

from django.core.management.base import BaseCommand, CommandError, CommandParser

from idempotency.exceptions import (
    InProgress,
    InterventionRequired,
    KeyReused,
    Rejected,
    Unavailable,
    Unfinished,
)
from rides_demo.models import PILOT_AMOUNT, Pilot, Ride
from rides_demo.operations import by_pilot, key_of, pay_pilot
from rides_demo.sharding import shard_of_request
from rides_demo.tenants import shards


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a day such as 2026-11-25") from None


class Command(BaseCommand):
    help = (
        "Pay each pilot what the rides of a day have earned. Each pilot is paid once a day, even if"
        " the command is repeated, runs twice at once, or is killed."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--day",
            type=_day,
            nargs="+",
            required=True,
            metavar="YYYY-MM-DD",
            help="the day (UTC), which must be over; or several days",
        )

    def handle(self, *args: object, day: list[date], **options: object) -> None:
        if [each for each in day if each >= datetime.now(UTC).date()]:
            raise CommandError("A day can be paid when it is over (UTC).")
        unpaid = 0
        for shard in shards().values():
            # The router sends the key of a payout to the database of the tenant.
            shard_of_request.set(shard)
            unpaid += sum(self._pay_day(each, shard) for each in day)
        if unpaid:
            raise CommandError(
                f"Not paid yet: {unpaid}. Run the command again. It pays no pilot twice."
            )

    def _pay_day(self, day: date, shard: str) -> int:
        """Pay the pilots for a day; return how many could not be paid. A pilot with a ride that is
        still being booked is not paid yet, because the sum would change."""
        rides = Ride.objects.using(shard).filter(created_at__date=day)
        waiting = by_pilot(
            rides.filter(idempotency_key__isnull=False, idempotency_key__finished_at=None), shard
        )
        for pilot, count in waiting.items():
            self._say(f"{day}: {pilot}: not paid yet, because {count} rides are still being booked")
        earned = {
            pilot: count * PILOT_AMOUNT
            for pilot, count in by_pilot(
                rides.filter(stripe_charge_id__isnull=False), shard
            ).items()
            if pilot not in waiting
        }
        self._say(f"{day}: {len(earned)} pilots have earned ${sum(earned.values()) / 100:.2f}")
        paid = [self._pay(day, pilot, cents, shard) for pilot, cents in earned.items()]
        return len(waiting) + paid.count(False)

    def _pay(self, day: date, pilot: Pilot, cents: int, shard: str) -> bool:
        try:
            result = pay_pilot.once(
                key_of(day, pilot), pilot=pilot.pk, day=str(day), cents=cents, shard=shard
            )
        except Unfinished as error:
            said = f"not finished; the completer continues ({error.__cause__})"
        except (InProgress, InterventionRequired, KeyReused, Rejected, Unavailable) as error:
            said = f"not paid: {error}"
        else:
            said = f"${cents / 100:.2f} with the transfer {result['transfer']}"
            self._say(f"{day}: {pilot}: {said}")
            return True
        self._say(f"{day}: {pilot}: {said}")
        return False

    def _say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()
