"""A project with django-tenants, whose tenants are schemas of Citus. The settings are those of the guide."""
