"""`sluice simulate` and `sluice plan` as they are called."""

import json
import re
from pathlib import Path

import pytest

from cli import bench
from cli.main import run
from simulator.measured import MeshCost
from sluice.settings.batching import PRESETS
from tests.cli.commands import Cli
from tests.simulator.kit import COST, LINKS, SHARING

LOAD = ("--arrivals", "poisson:rate=10,class=interactive,lengths=desk", "--seconds", "5")
LINE = '{"at_s": %s, "prompt_tokens": 30, "answer_tokens": 9, "class": "bulk", "model": "%s"}'


async def test_policies_are_compared_in_one_run(cli: Cli) -> None:
    ran = await cli("simulate", *LOAD, "--policies", "fixed,continuous", "--worker-hour-price", "2")
    assert (ran.code, ran.err) == (0, "")
    for word in ("fixed", "continuous", "ttft p50", "in slo", "padding", "utilization", "cost"):
        assert word in ran.out
    assert max(map(len, ran.out.splitlines())) <= 100


async def test_all_policies_are_compared_on_both_engines(cli: Cli) -> None:
    ran = await cli("simulate", "--policies", "all", "--seconds", "2")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= 100
    for word in ("padding", "tokens/s", "ttft p50", "p95", "total p50"):
        assert word in lines[0]
    shares = {line.split()[0]: line.split()[1] for line in lines[1:]}
    names = [f"generate/{name}" for name in (*PRESETS, "default")]
    assert list(shares) == [*names, *(f"continuous/{name}" for name in PRESETS)]
    assert {shares[name] for name in shares if name.startswith("continuous")} == {"0.0%"}
    assert float(shares["generate/length"][:-1]) < float(shares["generate/window"][:-1]) / 2
    again = await cli("simulate", "--policies", "all", "--seconds", "2")
    assert again.out == ran.out, "the trace is seeded"


async def test_a_comparison_takes_one_engine_and_other_traffic(cli: Cli) -> None:
    ran = await cli("simulate", *LOAD, "--policies", "all", "--engine", "generate", "--json")
    policies = json.loads(ran.out)["policies"]
    assert list(policies) == list(PRESETS)
    assert all(0 < summary["padding_share"] < 1 for summary in policies.values())


async def test_json_has_every_number(cli: Cli) -> None:
    ran = await cli("simulate", *LOAD, "--json")
    (name, summary), *rest = json.loads(ran.out)["policies"].items()
    assert (name, rest) == ("continuous", [])
    assert summary["classes"][0]["arrived"] == summary["classes"][0]["finished"] > 0
    assert set(summary["classes"][0]["ttft_s"]) == {"p50", "p95", "p99"}
    assert summary["cost"] is None


async def test_a_trace_is_played(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join([LINE % (0.5, "small"), LINE % (0.1, "large"), LINE % (1, "small")]))
    ran = await cli("simulate", "--trace", str(file), "--model", "small", "--json")
    (bulk,) = json.loads(ran.out)["policies"]["continuous"]["classes"]
    assert (bulk["priority_class"], bulk["arrived"], bulk["answer_tokens"]) == ("bulk", 2, 18)


async def test_a_cost_may_be_fitted_to_a_file(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    points = [[rows, 0, 1000 * (1 + rows)] for rows in range(1, 20)]
    file.write_text(json.dumps({"figure": "engine_cost", "phase": "decode", "points": points}))
    ran = await cli("simulate", *LOAD, "--cost", str(file), "--json")
    summary = json.loads(ran.out)["policies"]["continuous"]
    assert summary["classes"][0]["latency_s"]["p50"] > 5


async def test_workers_may_share_cores_as_a_measured_mesh_did(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "costs.jsonl"
    file.write_text(MeshCost(COST, 0.1, LINKS, SHARING).line())
    p50 = []
    for cores in ("0", "4", "2"):
        ran = await cli("simulate", *LOAD, "--cost", str(file), "--cores", cores, "--json")
        summary = json.loads(ran.out)["policies"]["continuous"]
        p50.append(summary["classes"][0]["latency_s"]["p50"])
    assert p50 == sorted(p50)
    assert p50[0] < p50[2]


async def test_a_policy_of_the_configuration_can_be_simulated(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "sluice.yaml"
    file.write_text("batcher: {policy: {max_rows: 3}}\n")
    late = "poisson:rate=200,class=interactive,lengths=desk,timeout_s=2"
    load = ("--arrivals", late, "--seconds", "5")
    ran = await cli("simulate", *load, "--config", str(file), "--policies", "config", "--json")
    summary = json.loads(ran.out)["policies"]["config"]
    assert summary["rows_per_batch"] <= 3
    assert summary["classes"][0]["refused"] > 20
    ran = await cli("simulate", *load, "--config", str(file), "--no-admission", "--json")
    assert json.loads(ran.out)["policies"]["continuous"]["classes"][0]["refused"] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "give either --trace or --arrivals"),
        (("--arrivals", "poisson"), 1, "'poisson': rate is missing"),
        ((*LOAD, "--policies", "fastest"), 2, "no policy 'fastest'; there are fixed"),
        ((*LOAD, "--engine", "steam"), 2, "'steam' is not one of 'continuous', 'generate'"),
        ((*LOAD, "--cost", "huge"), 1, "no cost 'huge'"),
        ((*LOAD, "--cores", "2"), 1, "--cores: --cost names no file that says"),
        ((*LOAD, "--slo", "bulk:now"), 1, "'bulk:now': write CLASS"),
        (("--trace", "/no/such/file"), 1, "/no/such/file cannot be read"),
    ],
)
async def test_what_cannot_be_simulated_is_told(
    cli: Cli, arguments: tuple[str, ...], code: int, said: str
) -> None:
    ran = await cli("simulate", *arguments)
    assert ran.code == code
    assert said in ran.err


async def test_a_wrong_trace_is_told_by_line(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(LINE % (0, "small") + '\n{"at_s": "now"}\n')
    ran = await cli("simulate", "--trace", str(file))
    assert ran.code == 1
    assert f"{file}: line 2: answer_tokens is missing" in ran.err
    file.write_text(LINE % (0, "small"))
    ran = await cli("simulate", "--trace", str(file), "--model", "other")
    assert "no request to model 'other'" in ran.err


async def test_a_plan_for_a_trace(cli: Cli) -> None:
    load = ("--arrivals", "poisson:rate=150,class=interactive,lengths=desk", "--seconds", "2")
    ran = await cli("plan", *load, "--slo", "interactive:ttft=0.3", "--json")
    plan = json.loads(ran.out)
    assert plan["workers"] > 1
    assert plan["summary"]["classes"][0]["within_slo"] >= 0.99
    assert plan["one_less"]["classes"][0]["within_slo"] < 0.99
    ran = await cli("plan", *load[:2], "--seconds", "0.5", "--slo", "interactive:ttft=9")
    assert "workers meet the SLOs" in ran.out
    ran = await cli("plan", *load, "--slo", "interactive:ttft=0.3", "--workers-max", "1")
    assert ran.code == 1
    assert "1 workers do not meet the SLOs" in ran.err


async def test_a_plan_for_a_job(cli: Cli) -> None:
    lengths = ("--prompt-tokens", "lognormal/100/0.7/512", "--answer-tokens", "uniform/5/15")
    job = ("--documents", "100000000", "--hours", "24", "--worker-hour-price", "0.5", *lengths)
    ran = await cli("plan", *job, "--json")
    plan = json.loads(ran.out)
    assert plan["documents_per_s"] == pytest.approx(1157.4, abs=0.1)
    assert plan["cost"] == pytest.approx(plan["worker_hours"] / 2)
    ran = await cli("plan", *job)
    assert "documents a second of one worker" in ran.out
    ran = await cli("plan", *job, *LOAD)
    assert ran.code == 2


def test_a_plan_may_measure_its_costs_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = {"figure": "process_cost_nats", "also": {"request_us": 4e6, "token_us": 0}}
    lines = {
        "processes": json.dumps(process),
        "simulation": MeshCost(COST, 0.1, LINKS, SHARING).line(),
    }
    for name, line in lines.items():
        script = (
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
            "from bench.support.harness import options_of\noptions_of('').parse_known_args()\n"
            f"print({line!r} if 'large' not in sys.argv else 'the wrong model')\n"
        )
        (tmp_path / f"{name}.py").write_text(script)
    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    costs = tmp_path / "costs.jsonl"
    lengths = ("--prompt-tokens", "uniform/5/15", "--answer-tokens", "uniform/1/3")
    job = ("plan", "--documents", "3600", "--hours", "1", *lengths, "--json")

    assert run([*job, "--measure", "--model", "small", "--cost", str(costs)]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert costs.read_text().splitlines() == list(lines.values())
    nats = next(kind for kind in measured["fleet"] if kind["name"] == "nats")
    assert nats["needed"] == pytest.approx(2.0), "a document a second, in two servers of four cores"
    assert run([*job, "--cost", str(costs)]) == 0
    assert json.loads(capsys.readouterr().out) == measured

    assert run([*job, "--measure"]) == 2
    assert "--measure needs --cost FILE" in capsys.readouterr().err


@pytest.mark.long
async def test_a_plan_for_a_job_names_all_processes(cli: Cli) -> None:
    job = ("plan", "--documents", "100000000")
    ran = await cli(*job, "--json")
    spread = {kind["name"]: kind for kind in json.loads(ran.out)["fleet"]}
    ran = await cli(*job, "--json", "--zones", "1", "--headroom", "0")
    least = {kind["name"]: kind for kind in json.loads(ran.out)["fleet"]}
    assert set(spread) == {"gateway", "batcher", "nats", "triton", "worker"}
    for name, kind in spread.items():
        assert kind["low"] <= kind["processes"] <= kind["high"]
        assert kind["processes"] % 3 == 0
        assert least[name]["processes"] < kind["processes"]


@pytest.mark.long
async def test_plans_of_docs_scale_are_what_the_command_prints(cli: Cli) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operate" / "scale.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\n\$ sluice (plan [^\n]+)\n(.*?)```", page, re.DOTALL)
    assert blocks
    for command, printed in blocks:
        ran = await cli(*command.split())
        assert [line.split() for line in ran.out.splitlines()] == [
            line.split() for line in printed.splitlines()
        ]
