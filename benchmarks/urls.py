"""The bare view, and the views of the system that ``BENCH_SYSTEM`` names."""

import os

from django.urls import path

from benchmarks import views
from benchmarks.contestant import load

urlpatterns = [
    path("bare/", views.bare),
    *[path(f"{name}/", view) for name, view in load(os.environ["BENCH_SYSTEM"]).VIEWS.items()],
]
