"""A PostgreSQL for tests that do not crash it."""

from rides_demo.services import Postgres


class HastyPostgres(Postgres):
    """A PostgreSQL that loses data when the machine crashes. Full pages are still written: some tests count WAL."""

    def prepare(self) -> None:
        """Switch fsync off."""
        super().prepare()
        self.command += ["-c", "fsync=off"]
