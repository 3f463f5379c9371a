"""The instruments of OpenTelemetry measure the same as the Prometheus exporter."""

from collections.abc import Callable
from typing import Any

from django.utils import timezone
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from idempotency.contrib.opentelemetry import observe_database
from idempotency.contrib.prometheus import OUTCOMES, PHASE_SECONDS, DatabaseCollector
from tests.factories import IdempotencyKeyFactory, StagedJobFactory
from tests.kit.serving import Sender
from tests.kit.views import create, plain, two_phases
from tests.traces.tree import Spans

Values = dict[tuple[str, tuple[tuple[str, Any], ...]], float]


def measured(reader: InMemoryMetricReader) -> Values:
    """Return the values by the name of the instrument and the attributes."""
    found = reader.get_metrics_data()
    return {
        (metric.name, tuple(sorted(point.attributes.items()))): getattr(
            point, "value", getattr(point, "count", None)
        )
        for resource in (found.resource_metrics if found is not None else [])
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def by_prometheus(*collectors: Any) -> Values:
    return {
        (sample.name.removesuffix("_count"), tuple(sorted(sample.labels.items()))): sample.value
        for collector in collectors
        for family in collector.collect()
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket", "_sum"))
    }


def test_outcomes_and_phases_are_counted_as_by_prometheus(
    spans: Spans, reader: InMemoryMetricReader, sender: Sender, serve: Callable[..., None]
) -> None:
    before = by_prometheus(OUTCOMES, PHASE_SECONDS)
    serve(plain=plain(create), phased=two_phases(lambda request: None, create))
    for url in ("/plain/", "/plain/", "/phased/"):
        sender.send(url, key=url)
    sender.send("/plain/", key="/plain/", body={"other": 1})
    after = by_prometheus(OUTCOMES, PHASE_SECONDS)
    counted = {
        name: value - before.get(name, 0)
        for name, value in after.items()
        if value != before.get(name, 0)
    }
    assert counted == measured(reader)
    reused = ("code", "key_reused"), ("outcome", "conflict")
    assert counted["idempotency_outcomes_total", reused] == 1
    assert sum(value for name, value in counted.items() if "phase" in name[0]) == 2


def test_the_gauges_are_those_of_prometheus(transactional_db: None) -> None:
    IdempotencyKeyFactory(
        stuck_code="view_gave_up", stuck_reason="It gave up.", stuck_at=timezone.now()
    )
    StagedJobFactory()
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    observe_database(meter_provider=provider)
    gauges, expected = measured(reader), by_prometheus(DatabaseCollector())
    assert gauges.keys() == expected.keys()
    same = [name for name in gauges if not name[0].endswith("_seconds")]
    assert [gauges[name] for name in same] == [expected[name] for name in same]
    provider.shutdown()
