"""Failover of PostgreSQL under traffic: two nodes, clients that retry, a provider with its own books. ``make failover``."""
