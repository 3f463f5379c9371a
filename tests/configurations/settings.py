"""The settings of the project, changed by the configurations that the variable CONFIGURATION
names."""

import os

from tests.configurations.projects import PROJECTS, Project
from tests.configurations.runner import MIGRATIONS

_server, _name = os.environ["CONFIGURATION_SERVER"], os.environ["CONFIGURATION"]
_database = {
    "ENGINE": "django.db.backends.postgresql",
    "HOST": _server,
    "USER": "postgres",
    "NAME": "postgres",
    "OPTIONS": {},
    "TEST": {"NAME": f"test_{os.getpid()}"},
}
_project = Project(
    {
        "SECRET_KEY": "of the tests of configurations",
        "DEBUG": False,
        "ALLOWED_HOSTS": ["testserver", "localhost"],
        "ROOT_URLCONF": "tests.configurations.shop.urls",
        "USE_TZ": True,
        "DEFAULT_AUTO_FIELD": "django.db.models.BigAutoField",
        "DATABASES": {"default": _database},
        "INSTALLED_APPS": [
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.sessions",
            "django.contrib.messages",
            "django.contrib.staticfiles",
            "idempotency",
            "tests.configurations.users",
            "tests.configurations.shop.apps.ShopConfig",
        ],
        "MIDDLEWARE": [
            "django.middleware.security.SecurityMiddleware",
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.middleware.common.CommonMiddleware",
            "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        "TEMPLATES": [
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        "STATIC_URL": "/static/",
        "PASSWORD_HASHERS": ["django.contrib.auth.hashers.MD5PasswordHasher"],
        "IDEMPOTENCY": {"ENQUEUERS": {"*": "tests.configurations.shop.views.hand_over"}},
        "LOGGING": {"version": 1, "disable_existing_loggers": False, "root": {"level": "CRITICAL"}},
        "LOGIN_URL": "/login/",
        "MIGRATION_MODULES": dict(MIGRATIONS),
        "TEST_RUNNER": "tests.configurations.runner.Runner",
    }
)
for _each in filter(None, _name.split("+")):
    PROJECTS[_each](_project)
globals().update(_project.settings)
os.environ["CONFIGURATION_STARTS"] = ",".join(_project.starts)
