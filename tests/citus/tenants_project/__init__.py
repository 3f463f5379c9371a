"""A project with django-tenants, whose tenants are schemas of Citus. The settings are from the
guide."""
