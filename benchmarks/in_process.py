"""Measure with one client in process: our views and the bare one, in interleaved rounds."""

import time
from collections.abc import Callable
from statistics import median, quantiles

from django.http import HttpRequest

from benchmarks import views
from idempotency import claims, http
from idempotency.options import Options

#: Requests of one case in a round.
IN_A_ROUND = 20
Case = tuple[views.View, Callable[[], HttpRequest], int]


def cases() -> dict[str, Case]:
    """Return each view, the request it gets, and the status that it must answer with."""
    for view, key in ((views.plain, "fixed-plain"), (views.ride, "fixed-ride")):
        view(views.request(key))
    hold("held")
    return {
        "bare": (views.bare, views.request, 201),
        "plain first": (views.plain, views.request, 201),
        "plain replay": (views.plain, lambda: views.request("fixed-plain"), 201),
        "plain mismatch": (views.plain, lambda: views.request("fixed-plain", "{}"), 422),
        "phased replay": (views.ride, lambda: views.request("fixed-ride"), 201),
        "phased conflict": (views.ride, lambda: views.request("held"), 409),
        "ride": (views.ride, views.request, 201),
    }


def hold(key: str) -> None:
    """Claim a key of the ride as a run does that is still under way."""
    options: Options = views.ride.idempotency
    described = http.describe(views.request(key), views.caller(views.request()), key, options)
    claims.claim_phased(described, options.every_point()[:-1], using="default")


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Return for each case the median and the quartiles in microseconds, and the ratio of its median to the bare view's."""
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, (view, make, status) in cases().items():
            for request in [make() for _ in range(IN_A_ROUND)]:
                start = time.perf_counter()
                response = view(request)
                taken.setdefault(name, []).append(1e6 * (time.perf_counter() - start))
                if response.status_code != status:
                    raise RuntimeError(f"{name}: {response.status_code} instead of {status}: {response.content!r}")
    bare = median(taken["bare"])
    return {name: _summary(values, bare) for name, values in taken.items()}


def _summary(values: list[float], bare: float) -> dict[str, float]:
    lower, middle, upper = quantiles(values, n=4)
    return {"median_us": round(middle), "q1_us": round(lower), "q3_us": round(upper), "ratio": round(middle / bare, 2)}
