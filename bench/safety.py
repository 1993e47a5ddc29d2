"""Cost of the safety layer: the input path of a prompt (normalize, search with all default rules, decide) on one core,
for ordinary text of 1 kB and 32 kB; the output filter per token; and the throughput of the mesh under the default
policy compared with a policy that is switched off. The peer is the project's bound, or the mesh without safety.

    python bench/safety.py [--json] [--runs N] [--only input|output|mesh]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.mesh import ANSWER_TOKENS, ECHO_TOKENS, MODEL, STREAMS, MeshClient, bench_settings
from bench.support.harness import MIN_RUNS, Figure, Run, compare, emit, machine, run_count
from gateway.config.models import load_catalog
from gateway.config.policies import load_inspector, load_policies_of
from gateway.models.tokenizer import ModelTokenizer
from gateway.safety.inspector import Inspector, verdict_on
from gateway.safety.output.filter import OutputFilter, OutputRules
from gateway.streaming.transcript import Transcript
from sluice.settings import Settings
from sluice.v1 import inference_pb2, inference_pb2_grpc
from supervisor.mesh import running_mesh

if TYPE_CHECKING:
    Stub = inference_pb2_grpc.InferenceServiceAsyncStub

SIZES: Final = (("1kb", 1_000, 0.3, 1_000), ("32kb", 32_000, 3.0, 200))
"""Name, UTF-8 bytes of a prompt, the bound in milliseconds, prompts of a run."""

OUTPUT_BOUND_US: Final = 10.0
OUTPUT_BYTES: Final = 2_000
ANSWERS: Final = 100

_ENGLISH: Final = (
    "The committee met on Tuesday to talk about the new library and what it will cost.",
    "Could you sort these numbers for me: 17, 4, 250, 33 and 8? Explain each step, please.",
    "Rain is expected in the north, while the south stays dry with up to 24 degrees.",
    "The order 48213 left the warehouse on 12 May 2026 and should have been here by now.",
    "A good summary keeps the reasons and leaves the repetition out, in three sentences.",
)
_CODE: Final = (
    "def total(rows: list[dict[str, float]]) -> float:",
    '    return sum(row["price"] * row["count"] for row in rows if row["count"] > 0)',
    "SELECT name, count(*) FROM orders WHERE created_at > '2026-01-01' GROUP BY name;",
    "for (int i = 0; i < n; ++i) {{ if (a[i] != b[i]) {{ return i; }} }}",
    "| item | count | price |\n|---|---:|---:|\n| bolts | 12 | 3.50 |",
)
_SCRIPTS: Final = (
    "Das Gerät wurde geprüft, größere Mängel sind nicht aufgefallen; die Übergabe war am Freitag.",
    "Комитет собрался во вторник, чтобы обсудить новую библиотеку и её стоимость.",
    "委員会は火曜日に集まり、新しい図書館とその費用について話し合いました。",
    "اجتمعت اللجنة يوم الثلاثاء لمناقشة المكتبة الجديدة وتكلفتها.",
    "समिति मंगलवार को नए पुस्तकालय और उसकी लागत पर चर्चा करने के लिए मिली। 👩‍💻🎉",
)
_SIGNATURE: Final = "\nJo Field, jo{0}@example.org, +44 20 7946 {1:04}"
_CONTACTS: Final = ("Write to desk{0}@example.org or call +44 20 7946 {1:04}.", *_ENGLISH[:3])
CORPORA: Final = {"English": _ENGLISH, "code and tables": _CODE, "five scripts": _SCRIPTS}
DENSE: Final = "contact list"
"""Not ordinary, so it is reported separately: an e-mail address and a telephone number every 300 characters."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=run_count, default=MIN_RUNS)
    parser.add_argument("--only", choices=("input", "output", "mesh"))
    options = parser.parse_args()
    figures: list[Figure] = []
    if options.only in (None, "input"):
        inspector = load_inspector(Settings())
        figures += [measure(inspector, *size, options.runs) for size in SIZES]
    if options.only in (None, "output"):
        figures.append(measure_output(options.runs))
    if options.only in (None, "mesh"):
        figures.append(uvloop.run(measure_mesh(options.runs)))
    emit(figures, options.json)


def measure(
    inspector: Inspector, name: str, size: int, bound_ms: float, count: int, runs: int
) -> Figure:
    """The median over runs of the 99th percentile of the worst corpus."""
    by_corpus = {
        corpus: statistics.median(
            p99_ms(inspector, list(islice(prompts(lines, size), count))) for _ in range(runs)
        )
        for corpus, lines in {**CORPORA, DENSE: _CONTACTS}.items()
    }
    ours = max(by_corpus[corpus] for corpus in CORPORA)
    each = ", ".join(f"{corpus} {ms:.3g}" for corpus, ms in by_corpus.items())
    return Figure(
        f"input_p99_ms_{name}",
        ours,
        bound_ms,
        bound_ms / ours,
        "ms",
        runs,
        machine(),
        f"whole input path with all default rules, p99 of {count} prompts of {size} bytes; the peer is the bound; "
        f"every English prompt ends with an e-mail address and a telephone number; ours is the slowest of "
        f"{', '.join(CORPORA)}, the {DENSE} does not count: {each}",
    )


def prompts(lines: Sequence[str], size: int) -> Iterator[str]:
    """Ordinary prompts of ``size`` bytes, no two alike."""
    for start in cycle(range(10_000)):
        text, total = [], 0
        for at, line in enumerate(islice(cycle(lines), start % len(lines), None)):
            text.append(f"{start + at}. {line.format(start + at, (start + at) % 10_000)}")
            total += len(text[-1].encode()) + 1
            if total >= size:
                end = _SIGNATURE.format(start, start % 10_000) if lines is _ENGLISH else ""
                body = "\n".join(text).encode()[: size - len(end)]
                yield body.decode(errors="ignore") + end
                break


def p99_ms(inspector: Inspector, texts: Sequence[str]) -> float:
    """The 99th percentile of the time for one prompt, after a warm-up."""
    took = []
    for text in (*texts[:20], *texts):
        start = time.perf_counter()
        verdict_on(list(inspector.begin("default", {}, [text]).results()))
        took.append((time.perf_counter() - start) * 1000)
    return statistics.quantiles(took[20:], n=100)[98]


def measure_output(runs: int) -> Figure:
    """What the filter adds to a token, everything redacted, for the worst corpus; answers with and without in turn."""
    tokenizer = load_catalog(Settings())["small"].tokenizer
    policies = {"default": {}, "all redacted": {"default": "redact"}}
    compiled = load_policies_of(Settings(safety={"policies": _named(policies)}))
    texts = {
        corpus: [tokenizer.encode_text(t) for t in islice(prompts(lines, OUTPUT_BYTES), ANSWERS)]
        for corpus, lines in CORPORA.items()
    }
    medians: dict[str, dict[str, float]] = {}
    for name in policies:
        output = compiled.by_name[name.replace(" ", "_")].output
        assert output is not None
        medians[name] = {
            corpus: statistics.median(
                us_per_token(tokenizer, answers, output) - us_per_token(tokenizer, answers, None)
                for _ in range(runs)
            )
            for corpus, answers in texts.items()
        }
    ours = max(medians["all redacted"].values())
    each = "; ".join(
        f"{name}: " + ", ".join(f"{corpus} {us:.3g}" for corpus, us in by_corpus.items())
        for name, by_corpus in medians.items()
    )
    note = f"filter and gate beside the same transcript without; the peer is the bound; {each}"
    return Figure(
        "output_us_per_token",
        ours,
        OUTPUT_BOUND_US,
        OUTPUT_BOUND_US / ours,
        "us",
        runs,
        machine(),
        note,
    )


def us_per_token(
    tokenizer: ModelTokenizer, answers: Sequence[Sequence[int]], output: OutputRules | None
) -> float:
    """Microseconds for a token of an answer, from id to text."""
    start = time.perf_counter()
    for token_ids in answers:
        transcript = Transcript(
            tokenizer.detokenizer(),
            (),
            tokenizer.stop_token_ids,
            tokenizer.token_text,
            OutputFilter(output) if output is not None else None,
        )
        for token_id in token_ids:
            transcript.append(token_id)
        transcript.close()
    return (time.perf_counter() - start) * 1e6 / sum(map(len, answers))


def _named(policies: Mapping[str, object]) -> dict[str, object]:
    return {name.replace(" ", "_"): policy for name, policy in policies.items()}


class LabelledClient(MeshClient):
    """Asks under a policy: the same mesh serves both sides."""

    def __init__(self, stub: "Stub", model: str, policy: str) -> None:
        super().__init__(stub, model)
        self._policy = policy

    def _request(self, tokens: int) -> inference_pb2.GenerateRequest:
        request = super()._request(tokens)
        request.labels["policy"] = self._policy
        return request


async def measure_mesh(runs: int) -> Figure:
    """Tokens/s under the default policy beside those under one that is switched off, in one mesh, by label."""
    safety = {
        "policies": {"default": {}, "off": {"enabled": False}},
        "choose": [{"labels": {"policy": "off"}, "policy": "off"}],
    }
    settings = bench_settings().model_copy(update={"safety": safety})
    async with (
        running_mesh(settings) as mesh,
        grpc.aio.insecure_channel(mesh.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        echo = await _compare(stub, "echo", ECHO_TOKENS, runs)
        figure = await _compare(stub, MODEL, ANSWER_TOKENS, runs)
    note = f"{figure.note}; the echo engine alone, without a model: {echo.ratio:.3f}"
    return replace(figure, note=note)


async def _compare(stub: "Stub", model: str, tokens: int, runs: int) -> Figure:
    def under(policy: str) -> Run:
        client = LabelledClient(stub, model, policy)
        return lambda: client.tokens_per_s(STREAMS, tokens)

    return await compare(
        "mesh_with_policy_vs_without",
        under("default"),
        under("off"),
        unit="tokens/s",
        higher_is_better=True,
        runs=runs,
        note=f"{STREAMS} callers, model {model}; peer: requests whose policy is switched off; bound 0.97",
    )


if __name__ == "__main__":
    main()
