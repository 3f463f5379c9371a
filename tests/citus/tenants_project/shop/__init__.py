"""The work of a tenant: in its schema."""
