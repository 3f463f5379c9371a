"""The WSGI application of the demo, including static files."""

import os

from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "rides_demo.settings")
application = StaticFilesHandler(get_wsgi_application())
