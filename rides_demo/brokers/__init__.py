"""The jobs of the demo on a broker instead of RQ. Each module has a ``Backend``, and a function
``consume`` that runs the jobs until the broker is lost.

A job that failed, or whose message is lost, is handed over again soon: the simulator waits for it.
"""

QUEUE = "default"
FOLLOW_UP_SECONDS = 5
