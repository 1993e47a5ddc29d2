"""Metrics leave over OTLP, and stand on a page for Prometheus; without either nothing is opened."""

import asyncio
import re
import shutil
import socket
import subprocess
import urllib.request

import pytest
from opentelemetry.trace import SpanContext, TraceFlags
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from sluice.errors import SetupError
from sluice.telemetry.catalog import METRICS
from sluice.telemetry.metrics import measuring
from tests.support.otlp import otlp_receiver

KEY = "telemetry.prometheus.gateway"
SPAN = SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
CHAT = "chat", "sluice", "small", "interactive"


@pytest.fixture(autouse=True)
def _no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_METRICS_EXPORTER", raising=False)


def read(page: str, accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://{page}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


def test_the_page_shows_metrics_by_the_names_of_prometheus() -> None:
    with measuring("sluice-test", "one", "127.0.0.1:0", KEY) as metrics:
        metrics.instruments.counter("sluice.requests")["", "bulk", "OVERLOADED"] += 2
        metrics.instruments.observe(
            "sluice.worker.kv_cache.usage", lambda: [(("small", "a:1/small"), 0.25)]
        )
        assert metrics.page is not None
        assert not metrics.page.endswith(":0")
        lines = read(metrics.page).splitlines()
    (line,) = [line for line in lines if line.startswith("sluice_requests_total{")]
    assert 'sluice_class="bulk"' in line
    assert line.endswith(" 2.0")
    assert any(line.startswith("sluice_worker_kv_cache_usage_ratio{") for line in lines)
    assert any('service_instance_id="one"' in line for line in lines)
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)
    with pytest.raises(OSError, match="refused"):
        read(metrics.page)


def test_a_bucket_leads_to_a_trace_where_exemplars_are_asked_for() -> None:
    with measuring("sluice-test", "one", "127.0.0.1:0", KEY) as metrics:
        first_token = metrics.instruments.histogram("gen_ai.server.time_to_first_token")
        first_token.record(CHAT, 0.03, SPAN)
        first_token.record(CHAT, 0.2)
        assert metrics.page is not None
        plain = read(metrics.page)
        text = read(metrics.page, "application/openmetrics-text")
    name = "gen_ai_server_time_to_first_token_seconds"
    assert f"{name}_count{{" in plain
    families = {one.name: one for one in text_string_to_metric_families(text)}
    assert families[name].type == "histogram"
    (with_exemplar,) = [line for line in text.splitlines() if " # " in line]
    assert 'le="0.04"' in with_exemplar
    assert f'trace_id="{0xABC:032x}"' in with_exemplar
    (last,) = [line for line in text.splitlines() if f"{name}_bucket" in line and "+Inf" in line]
    assert last.split()[-1] == "2.0"


def test_promtool_finds_nothing_wrong_with_a_page_of_all_metrics() -> None:
    with measuring("sluice-test", "one", "127.0.0.1:0", KEY) as metrics:
        for one in METRICS.values():
            labels = tuple("x" for _ in one.labels)
            if one.kind == "counter":
                metrics.instruments.counter(one.name)[labels] += 1
            elif one.kind == "histogram":
                metrics.instruments.histogram(one.name).record(labels, 0.1)
            else:
                metrics.instruments.observe(one.name, lambda labels=labels: [(labels, 1.0)])
        assert metrics.page is not None
        page, open_metrics = read(metrics.page), read(metrics.page, "application/openmetrics-text")
    named = set(re.findall(r"^# HELP (\S+) .", page, re.MULTILINE))
    typed = set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))
    assert typed - named == set()
    assert {one.name for one in text_string_to_metric_families(open_metrics)} >= {"target"}
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here: apt-get install prometheus")
    ran = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_page_is_served_at_an_ipv6_address() -> None:
    with measuring("sluice-test", "one", "[::1]:0", KEY) as metrics:
        metrics.instruments.counter("sluice.requests")["", "bulk", "stop"] += 1
        assert metrics.page is not None
        assert metrics.page.startswith("[::1]:")
        assert "sluice_requests_total{" in read(metrics.page)


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
        sent = {metric.name: metric for metric in receiver.metrics}
    if exporter == "none":
        assert not sent
        return
    assert set(sent) == {"sluice.requests", "gen_ai.server.time_to_first_token"}
    (count,) = sent["sluice.requests"].sum.data_points
    assert count.as_int == 1
    assert {pair.key for pair in count.attributes} == {"sluice.class", "sluice.outcome"}
    (point,) = sent["gen_ai.server.time_to_first_token"].histogram.data_points
    assert (point.count, point.sum) == (1, 0.03)
    assert point.exemplars[0].trace_id.hex() == f"{0xABC:032x}"


def count_one() -> None:
    with measuring("sluice-test", "one") as metrics:
        assert metrics.page is None
        metrics.instruments.counter("sluice.requests")["", "bulk", "stop"] += 1
        metrics.instruments.histogram("gen_ai.server.time_to_first_token").record(CHAT, 0.03, SPAN)
