"""The processes of the demo: supervisor, worker, and embedded PostgreSQL and Redis."""
