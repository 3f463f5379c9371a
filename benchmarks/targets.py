"""The targets of ``make bench``, in one place.

A limit that cannot be met is changed here, with a comment that says what bounds it, the profile that shows it,
and how near it came.
"""

#: Medians of one client in process over the bare view of the same run.
AT_MOST = {
    "plain first": 1.5,
    "plain replay": 0.75,
    "phased replay": 0.4,
    "phased conflict": 0.5,
    "ride": 3.8,
}
