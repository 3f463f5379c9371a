"""Projects of others: one small Django project under the settings, middleware, packages and
databases that projects have."""
