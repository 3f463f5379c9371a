"""How Sphinx builds the docs: nothing is fetched, neither here nor by who reads them."""

project = "django-idempotency"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = project
myst_heading_anchors = 3
