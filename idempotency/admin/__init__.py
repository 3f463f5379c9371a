"""The admin, as the person on call needs it: what became of each request, what waits for a person, and how to move it on.

No page counts a whole table, joins for a row, or loads a body for a list. Rows are never added, changed or deleted by hand: a
key is moved by ``idempotency.interventions`` alone, each of them under a permission of its own.
"""

from idempotency.admin import job_list, keys, message_list  # noqa: F401 - they register themselves
