"""The app on Citus with schema-based sharding: ``make citus``."""
