"""The application of gunicorn: the bare view and the views of the system that ``BENCH_SYSTEM``
names."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
application = get_wsgi_application()
