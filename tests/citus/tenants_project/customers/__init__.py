"""The tenants. Their tables are in the public schema."""
