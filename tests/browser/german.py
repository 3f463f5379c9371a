"""The demo in German, as a deployment with another ``LANGUAGE_CODE``:
``service.serve("tests.browser.german")``."""

from rides_demo import settings

settings.LANGUAGE_CODE = "de"

from rides_demo.wsgi import application  # noqa: E402, F401  # it reads the settings
