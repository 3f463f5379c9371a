"""Failover of PostgreSQL under traffic (``make failover``): two nodes, clients that retry, a
provider with its records."""
