"""What gunicorn serves: the demo, and the static files of its admin."""

import os

from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "rides_demo.settings")
application = StaticFilesHandler(get_wsgi_application())
