"""Rules, dashboards and scrape configuration name only what a mesh has, and promtool runs their unit tests."""

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.support.compose import FOLDER, ROOT
from tests.support.promql import names_in, problems

RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FOLDER / "prometheus.rules.yaml").read_text())["groups"]
    for rule in group["rules"]
]
RECORDED = {
    rule["record"]: {name for name in names_in(rule["expr"])[1] if name != "le"}
    for rule in RULES
    if "record" in rule
}
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RUNBOOK = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")


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
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
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
