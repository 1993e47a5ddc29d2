"""Metrics leave over OTLP, and stand on a page for Prometheus; without either nothing is opened."""

import asyncio
import socket
import urllib.request

import pytest

from sluice.errors import SetupError
from sluice.telemetry.metrics import measuring
from tests.support.otlp import otlp_receiver

KEY = "telemetry.prometheus.gateway"


@pytest.fixture(autouse=True)
def _no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_METRICS_EXPORTER", raising=False)


def read(page: str) -> str:
    with urllib.request.urlopen(f"http://{page}/metrics", timeout=10) as response:
        return str(response.read().decode())


def test_the_page_shows_instruments_by_the_names_of_prometheus() -> None:
    with measuring("sluice-test", "one", "127.0.0.1:0", KEY) as metrics:
        metrics.meter.create_counter("sluice.requests", "{request}").add(
            2, {"sluice.class": "bulk"}
        )
        assert metrics.page is not None
        assert not metrics.page.endswith(":0")
        text = read(metrics.page)
    (line,) = [line for line in text.splitlines() if line.startswith("sluice_requests_total{")]
    assert 'sluice_class="bulk"' in line
    assert line.endswith(" 2.0")
    assert 'service_instance_id="one"' in text
    assert "process_resident_memory_bytes" in text
    with pytest.raises(OSError, match="refused"):
        read(metrics.page)


def test_a_port_in_use_is_named_with_its_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(SetupError, match=rf"^{KEY}: {address} is in use"),
            measuring("sluice-test", "one", address, KEY),
        ):
            pass


def test_an_address_without_a_port_is_refused() -> None:
    with (
        pytest.raises(SetupError, match=rf"^{KEY}: '9464' is not HOST:PORT"),
        measuring("sluice-test", "one", "9464", KEY),
    ):
        pass


@pytest.mark.parametrize("exporter", ["otlp", "none"])
async def test_they_leave_over_otlp_unless_that_is_switched_off(
    exporter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.grpc_endpoint)
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", exporter)
        await asyncio.to_thread(count_one)
        sent = {metric.name for metric in receiver.metrics}
    assert sent == ({"sluice.requests"} if exporter == "otlp" else set())


def count_one() -> None:
    with measuring("sluice-test", "one") as metrics:
        assert metrics.page is None
        metrics.meter.create_counter("sluice.requests").add(1)
