"""lm-evaluation-harness as it is, at the suite's mesh. SLUICE_LM_EVAL names the program.

It has an environment of its own: `pip install "lm-eval[api]" transformers` there. The shapes of its requests are in
tests/gateway/http/test_prompts.py.
"""

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

from sluice.settings import resolve_model_path
from tests.interop.tools import run
from tests.support.mesh import RunningMesh

LM_EVAL: Final = os.environ.get("SLUICE_LM_EVAL", "")
BOUND_S: Final = 240.0
ITEMS: Final = (
    {"asked": "Sort: 31, 7, 19", "choices": ["7, 19, 31", "31, 7"], "right": 0, "text": "Héllo 😀"},
    {"asked": "Sort: 5, 2", "choices": ["2, 5", "5, 2"], "right": 0, "text": "Dear customer,\n"},
)
TASKS: Final[dict[str, dict[str, Any]]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{asked}}\n",
        "doc_to_target": "right",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "until": {
        "output_type": "generate_until",
        "doc_to_text": "{{asked}}\n",
        "doc_to_target": "{{choices[right]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match"}],
    },
}

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.long,
    pytest.mark.skipif(not LM_EVAL, reason="SLUICE_LM_EVAL names no lm_eval"),
]


def write_tasks(folder: Path) -> None:
    (folder / "items.jsonl").write_text("\n".join(json.dumps(item) for item in ITEMS))
    for name, task in TASKS.items():
        source = {"test": str(folder / "items.jsonl")}
        whole = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": source},
            "test_split": "test",
            **task,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # which is YAML


async def evaluated(folder: Path, *options: str) -> dict[str, dict[str, Any]]:
    program = ("env", "-u", "PYTHONPATH", LM_EVAL, "run")
    paths = ("--include_path", folder, "--output_path", folder / "out")
    ran = await run(*program, *paths, *options, bound_s=BOUND_S)
    assert ran.code == 0, ran.err
    (report,) = (folder / "out").rglob("results*.json")
    results: dict[str, dict[str, Any]] = json.loads(report.read_text())["results"]
    report.unlink()
    return results


@pytest.mark.parametrize("batch_size", ["1", "4"])
async def test_local_completions_as_it_is(
    mesh: RunningMesh, tmp_path: Path, batch_size: str
) -> None:
    write_tasks(tmp_path)
    folder, url = resolve_model_path("builtin:large"), f"http://{mesh.http}/v1/completions"
    arguments = f"model=large,base_url={url},tokenizer={folder}"
    results = await evaluated(
        tmp_path,
        *("--model", "local-completions", "--model_args", arguments),
        *("--tasks", ",".join(TASKS), "--batch_size", batch_size),
    )
    assert results.keys() == TASKS.keys()
    assert results["rolling"]["bits_per_byte,none"] > 0


async def test_local_chat_completions(mesh: RunningMesh, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    arguments = f"model=large,base_url=http://{mesh.http}/v1/chat/completions"
    results = await evaluated(
        tmp_path,
        *("--model", "local-chat-completions", "--model_args", arguments),
        *("--apply_chat_template", "--tasks", "until"),
    )
    assert "exact_match,none" in results["until"]
