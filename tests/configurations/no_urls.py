"""A URLconf that serves nothing."""

urlpatterns: list[object] = []
