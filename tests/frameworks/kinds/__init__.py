"""The kinds of view of the table: each makes, of the same work, the view that its framework's users
would write."""

from tests.frameworks.kinds import django_views, ninja_views, rest_views
from tests.frameworks.kinds.base import Job, Kind

__all__ = ["FAMILIES", "KINDS", "Job", "Kind"]

KINDS = [
    Kind("function", django_views.function, 302),
    Kind("class, dispatch", django_views.class_by_dispatch, 302),
    Kind("class, post", django_views.class_by_post, 302),
    Kind("class, method", django_views.class_method, 302),
    Kind("async function", django_views.async_function, 302),
    Kind("async method", django_views.async_method, 302),
    Kind("async, post", django_views.async_by_post, 302),
    Kind("form", django_views.form, 302, by_form=True),
    Kind("DRF APIView", rest_views.api_view_class, 401, by_token=True),
    Kind("DRF @api_view", rest_views.api_view_function, 401, by_token=True),
    Kind("DRF ViewSet", rest_views.view_set, 401, by_token=True),
    Kind("DRF @action", rest_views.extra_action, 401, by_token=True),
    Kind("DRF generic", rest_views.generic_create, 401, by_token=True),
    Kind("Ninja", ninja_views.operation, 401, by_token=True),
    Kind("Ninja async", ninja_views.async_operation, 401, by_token=True),
]

#: One kind of each family. The other kinds are called by the same adapters: they run the cases
#: marked ``adapter``, and all cases in ``make test-all``.
FAMILIES = {"function", "async function", "form", "DRF APIView", "Ninja"}
