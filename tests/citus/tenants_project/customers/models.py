"""A tenant and its hosts."""

from django_tenants.models import DomainMixin, TenantMixin


class Customer(TenantMixin):
    """A tenant with a schema."""

    class Meta:
        app_label = "customers"

    def __str__(self) -> str:
        return str(self.schema_name)


class Domain(DomainMixin):
    """A host of a tenant."""

    class Meta:
        app_label = "customers"

    def __str__(self) -> str:
        return str(self.domain)
