"""Read-only admin pages of Rocket Rides."""

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin

from idempotency.contrib.admin import KeyStateMixin
from rides_demo.models import AuditRecord, Payout, Pilot, Receipt, Ride, User


class ReadOnlyAdmin(admin.ModelAdmin):
    """Show rows read-only: only the API and its jobs write them."""

    def has_add_permission(self, request, obj=None):
        return False

    def has_change_permission(self, request, obj=None):
        return False

    def has_delete_permission(self, request, obj=None):
        return False


@admin.register(User)
class RiderAdmin(UserAdmin):
    list_display = ("username", "email", "stripe_customer_id", "is_staff")
    fieldsets = (*UserAdmin.fieldsets, ("Payment", {"fields": ("stripe_customer_id",)}))


@admin.register(Ride)
class RideAdmin(KeyStateMixin, ReadOnlyAdmin):
    list_display = (
        "id",
        "user",
        "origin",
        "target",
        "stripe_charge_id",
        "paid_at",
        "created_at",
        "key_state",
    )
    readonly_fields = ("key_state",)
    list_select_related = ("user",)
    search_fields = ("=id", "stripe_charge_id", "user__email")


@admin.register(AuditRecord)
class AuditRecordAdmin(ReadOnlyAdmin):
    list_display = (
        "id",
        "action",
        "resource_type",
        "resource_id",
        "user",
        "origin_ip",
        "created_at",
    )
    list_select_related = ("user",)


@admin.register(Receipt)
class ReceiptAdmin(ReadOnlyAdmin):
    list_display = ("id", "ride", "email", "created_at")


@admin.register(Pilot)
class PilotAdmin(ReadOnlyAdmin):
    list_display = ("name", "stripe_account_id")


@admin.register(Payout)
class PayoutAdmin(ReadOnlyAdmin):
    list_display = ("id", "pilot", "day", "cents", "stripe_transfer_id", "created_at")
    list_select_related = ("pilot",)
