"""How Sphinx builds the docs: nothing is fetched, neither here nor by who reads them."""

import os
import sys
from pathlib import Path

import django

# The docstrings are read by importing the app, which needs settings; no database is asked.
sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"DJANGO_SETTINGS_MODULE": "rides_demo.settings", "DATABASE_URL": "sqlite://:memory:"}
django.setup()

from idempotency import __version__  # noqa: E402

project = "django-idempotency"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
version = release = __version__
html_title = f"{project} {release}"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
# The names of types are for type checkers; the meaning of an argument is in the docstring.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
