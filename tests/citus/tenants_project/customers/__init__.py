"""The tenants: in the public schema."""
