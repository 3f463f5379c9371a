"""How much is tried, and how many examples a run has really seen."""

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

from hypothesis import HealthCheck, Phase, settings

#: Examples by the name of their test.
seen: Counter[str] = Counter()

Test = Callable[..., None]


def examples(number: int) -> Callable[[Test], Test]:
    """Try ``number`` examples, new ones in each run; a failing one is made small, and printed so
    that it can be run again."""

    def decorate(test: Test) -> Test:
        @wraps(test)
        def counted(*args: Any, **kwargs: Any) -> None:
            test(*args, **kwargs)
            seen[test.__name__] += 1

        return settings(
            max_examples=number,
            deadline=None,
            database=None,
            print_blob=True,
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )(counted)

    return decorate
