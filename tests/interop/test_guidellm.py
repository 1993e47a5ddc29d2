"""guidellm, a load generator of the vLLM project, at the suite's mesh. SLUICE_GUIDELLM names the program.

It brings torch of its own, 6 GB in all, so it has an environment of its own: `pip install guidellm` there.
"""

import json
import os
from pathlib import Path
from typing import Final

import pytest

from sluice.settings import resolve_model_path
from tests.interop.tools import run
from tests.support.mesh import RunningMesh

GUIDELLM: Final = os.environ.get("SLUICE_GUIDELLM", "")
REQUESTS: Final = 20
OUTPUT_TOKENS: Final = 16
BOUND_S: Final = 240.0

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.long,
    pytest.mark.skipif(not GUIDELLM, reason="SLUICE_GUIDELLM names no guidellm"),
]


async def test_guidellm_measures_streams_of_chats(mesh: RunningMesh, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target=http://{mesh.http},model=small",
        "profile": "kind=concurrent,streams=4",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "data": f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}",
        "tokenizer": f"kind=hf_auto,model={resolve_model_path('builtin:small')}",
        "output": f"kind=json,path={report}",
    }
    given = [word for name, value in options.items() for word in (f"--{name}", value)]
    program = ("env", "-u", "PYTHONPATH", GUIDELLM, "run")
    ran = await run(*program, *given, "--disable-console", bound_s=BOUND_S)
    assert ran.code == 0, ran.err
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    assert metrics["request_totals"]["successful"] == REQUESTS
    assert metrics["request_totals"]["errored"] == 0
    # ignore_eos holds, and the usage of each answer is read.
    answered = metrics["output_token_count"]["successful"]
    assert (answered["min"], answered["max"]) == (OUTPUT_TOKENS, OUTPUT_TOKENS)
    assert metrics["prompt_token_count"]["successful"]["min"] >= 64
