"""Every metric of the catalog is one that a process emits."""

from typing import Any

import pytest
from opentelemetry.trace import NoOpTracer

from batcher.metrics import BatcherMetrics
from gateway.admission.class_limiter import ClassLimiter
from gateway.telemetry.drift import DriftMonitor
from gateway.telemetry.metrics import RequestMetrics
from jobs.process import JobProcess
from jobs.scheduler import JobScheduler
from sluice.settings import CallShares, JobsSettings
from sluice.telemetry import names
from sluice.telemetry.catalog import METRICS
from sluice.telemetry.instruments import Instruments
from sluice.telemetry.tracing import start_tracing
from tests.gateway.kit.runs import dispatch_to

SERVICES = (names.SERVICE_GATEWAY, names.SERVICE_BATCHER, names.SERVICE_JOBS)


def test_each_process_emits_its_metrics_of_the_catalog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    emitted = {service: Instruments() for service in SERVICES}
    gateway = emitted[names.SERVICE_GATEWAY]
    metrics = RequestMetrics(gateway)
    metrics.show(dispatch_to(), ClassLimiter(1, CallShares()))
    DriftMonitor("gw", gateway)
    BatcherMetrics(emitted[names.SERVICE_BATCHER])
    nothing: Any = None  # a scheduler that has not started asks nobody
    jobs = emitted[names.SERVICE_JOBS]
    JobScheduler(JobProcess("me", JobsSettings(), nothing, nothing, NoOpTracer(), jobs))
    for service, instruments in emitted.items():
        start_tracing(service, instruments).shutdown()
        wanted = {
            one.name for one in METRICS.values() if not one.services or service in one.services
        }
        assert {one.name for one in instruments.metrics} == wanted


def test_names_and_units_are_those_of_their_kind() -> None:
    assert len({one.page_name for one in METRICS.values()}) == len(METRICS)
    for one in METRICS.values():
        assert bool(one.bounds) is (one.kind == "histogram"), one.name
        assert list(one.bounds) == sorted(set(one.bounds)), one.name
        assert one.unit in ("", "s", "1") or one.unit.startswith("{"), one.name
        assert len(set(one.labels)) == len(one.labels), one.name


def test_no_label_names_a_tenant_or_a_request() -> None:
    labels = {label for one in METRICS.values() for label in one.labels}
    assert not labels & {names.TENANT, names.REQUEST_ID, names.BATCH_ID, names.WORKER_ID}
