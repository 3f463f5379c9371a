"""The work of a tenant. Its tables are in the schema of the tenant."""
