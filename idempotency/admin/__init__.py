"""The admin, for the person on call. It shows the state of each request, the requests that require
manual intervention, and the possible interventions.

No page counts a whole table. A list joins no other table and loads no body. Rows cannot be added,
edited or deleted by hand: only the functions of ``idempotency.interventions`` change them. Each of
these requires a permission in addition to the permission to view the rows.
"""

# These modules register their admins.
from idempotency.admin.job_list import StagedJobAdmin as StagedJobAdmin
from idempotency.admin.keys import DashboardAdmin as DashboardAdmin
from idempotency.admin.keys import IdempotencyKeyAdmin as IdempotencyKeyAdmin
from idempotency.admin.message_list import DownstreamCallAdmin as DownstreamCallAdmin
from idempotency.admin.message_list import ProcessedMessageAdmin as ProcessedMessageAdmin
