"""Rules, dashboards and scrape configuration name only what a mesh has, and promtool runs their unit tests."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from sluice.telemetry.catalog import METRICS
from tests.support.compose import FOLDER, ROOT
from tests.support.promql import endings, names_in, problems, recorded

RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FOLDER / "prometheus.rules.yaml").read_text())["groups"]
    for rule in group["rules"]
]
RECORDED = recorded(RULES)
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
DOCS = ROOT / "docs"
RUNBOOK = (DOCS / "operate" / "runbook.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("record") or rule["alert"])
def test_rules_name_metrics_and_labels_that_processes_emit(rule: dict[str, Any]) -> None:
    assert problems(rule["expr"], RECORDED) == []


def test_a_wrong_name_would_be_seen() -> None:
    assert problems('rate(sluice_request_total{model="a"}[5m])', {}) == [
        *("no metric sluice_request_total", "no label model")
    ]


def test_each_alert_has_its_section_in_the_runbook() -> None:
    assert re.findall(r"^## (.*)$", RUNBOOK, re.MULTILINE) == list(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"docs/operate/runbook.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")
        section = RUNBOOK.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert "- Look: " in section, name
        assert "- Do: " in section, name


def test_every_alert_has_a_unit_test() -> None:
    tests = yaml.safe_load((ROOT / "tests/compose/prometheus.test.yaml").read_text())["tests"]
    fired = {
        one["alertname"] for test in tests for one in test["alert_rule_test"] if "exp_alerts" in one
    }
    assert fired == set(ALERTS)


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "compose/prometheus.rules.yaml"),
        ("check", "config", "--syntax-only", "compose/prometheus.yaml"),
        ("test", "rules", "tests/compose/prometheus.test.yaml"),
    ],
)
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here: apt-get install prometheus")
    ran = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


DASHBOARDS = {path.stem: path for path in (FOLDER / "grafana").glob("*.json")}


def queries(value: Any) -> Iterator[str]:
    """The expressions in a dashboard."""
    if isinstance(value, dict):
        if isinstance(value.get("expr"), str):
            yield value["expr"]
        for one in value.values():
            yield from queries(one)
    elif isinstance(value, list):
        for one in value:
            yield from queries(one)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_name_metrics_and_labels_that_processes_emit(name: str) -> None:
    found = list(queries(json.loads(DASHBOARDS[name].read_text())))
    assert found
    wrong = {one: problems(one.replace("$__rate_interval", "5m"), RECORDED) for one in found}
    assert {one: said for one, said in wrong.items() if said} == {}


def test_every_metric_is_on_some_dashboard() -> None:
    shown: set[str] = set()
    for path in DASHBOARDS.values():
        for one in queries(json.loads(path.read_text())):
            shown |= names_in(one)[0]
    for rule in RULES:
        if rule.get("record") in shown:
            shown |= names_in(rule["expr"])[0]
    by_metric = {metric.name: endings(metric) for metric in METRICS.values()}
    hidden = {name for name, pages in by_metric.items() if not pages & shown}
    # Calibration, and whether routers have drifted, are for queries of their own.
    assert hidden == {"sluice.router.brier", "sluice.router.drifted"}
