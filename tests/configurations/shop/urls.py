"""The URLs of the shop."""

from django.conf import settings
from django.contrib import admin
from django.urls import include, path

from tests.configurations.shop import views

urlpatterns = [
    path("plain/", views.plain),
    path("both/", views.both),
    path("phased/", views.phased),
    path("method/", views.Method.as_view()),
    path("async/", views.coroutine),
    path("drf/", views.Rest.as_view()),
    path("drf-phased/", views.RestPhased.as_view()),
    path("ninja/", views.api.urls),
    path("form/", views.form),
    path("upload/", views.upload),
    path("webhook/", views.webhook),
    path("admin/", admin.site.urls),
    *(
        path(prefix, include(module))
        for prefix, module in getattr(settings, "EXTRA_URLS", {}).items()
    ),
]
