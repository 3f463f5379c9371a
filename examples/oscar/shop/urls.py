"""All URLs of Oscar, with the language in front, as in Oscar's sandbox."""

from django.apps import apps
from django.conf.urls.i18n import i18n_patterns
from django.urls import include, path

urlpatterns = [
    path("i18n/", include("django.conf.urls.i18n")),
    *i18n_patterns(path("", include(apps.get_app_config("oscar").urls[0]))),
]
