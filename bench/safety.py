"""Cost of the safety layer, each part beside a peer that does part of the same work in the same run.

    python bench/safety.py [--json] [--runs N] [--only input|output|mesh]

Times are processor time of the thread, so that other programs on the machine count little.

- input: the whole input path of a prompt (normalize, search with all default rules, decide) on one core. The peer
  searches for the patterns of the same rules one after the other with RE2, as Presidio does with its recognizers; it
  normalizes, validates and decides nothing. `also` has one bare pass of hyperscan for all patterns. Both see every
  prompt directly after us. p99 of the prompts of a run, median over runs; `input_p99_ms_1kb` and `input_p99_ms_32kb` of
  the slowest of three corpora of ordinary text, `contacts_p99_ms_1kb` and `contacts_p99_ms_32kb` of lists of contacts,
  where an e-mail address and a telephone number stand every 300 characters.
- output: `output_us_per_token`, what the output filter adds to a token when everything is redacted, in the slowest
  corpus. The peer is the rest of a token's way from id to text, detokenization and stop strings.
- mesh: tokens/s of 64 callers under the default policy; the peer is the same mesh asked under a policy that is switched
  off, by label. `mesh_with_policy_vs_without` with the large tier, `echo_with_policy_vs_without` without a model.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.mesh import ANSWER_TOKENS, ECHO_TOKENS, MODEL, STREAMS, MeshClient, bench_settings
from bench.support.harness import (
    Figure,
    Run,
    compare,
    emit,
    machine,
    options_of,
)
from gateway.config.models import load_catalog
from gateway.config.policies import load_policies_of
from gateway.models.tokenizer import ModelTokenizer
from gateway.safety.inspector import Inspector, verdict_on
from gateway.safety.output.filter import OutputFilter, OutputRules
from gateway.safety.patterns import compiled
from gateway.safety.rules.scanner import Prefilter
from gateway.safety.rules.spec import default_rules
from gateway.streaming.transcript import Transcript
from sluice.settings import Settings
from sluice.v1 import inference_pb2, inference_pb2_grpc
from supervisor.mesh import running_mesh

if TYPE_CHECKING:
    Stub = inference_pb2_grpc.InferenceServiceAsyncStub

SIZES: Final = (("1kb", 1_000, 500), ("32kb", 32_000, 100))
"""Name, UTF-8 bytes of a prompt, prompts of a run."""

OUTPUT_BYTES: Final = 2_000
ANSWERS: Final = 100

Search = Callable[[str], object]

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
"""Not ordinary, so it is reported separately."""
WARM_UP: Final = 20


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", choices=("input", "output", "mesh"))
    options = parser.parse_args()
    figures: list[Figure] = []
    if options.only in (None, "input"):
        inspector = Inspector(load_policies_of(Settings()))
        for size in SIZES:
            figures += measure(inspector, *size, options.runs)
    if options.only in (None, "output"):
        figures.append(measure_output(options.runs))
    if options.only in (None, "mesh"):
        figures += uvloop.run(measure_mesh(options.runs))
    emit(figures, options.json)


def measure(inspector: Inspector, name: str, size: int, count: int, runs: int) -> list[Figure]:
    """Of ordinary text and of lists of contacts."""
    sides = (_input_path(inspector), *_bare_searches())
    by_corpus = {
        corpus: quantiles_ms(sides, list(islice(prompts(lines, size), count)), runs)
        for corpus, lines in {**CORPORA, DENSE: _CONTACTS}.items()
    }
    slowest = max(CORPORA, key=lambda corpus: by_corpus[corpus][0][1])
    each = ", ".join(f"{corpus} {ms[0][1]:.3g}" for corpus, ms in by_corpus.items())
    note = f"p99 of {count} prompts of {size} bytes; peer: the same patterns one by one with RE2"
    return [
        Figure(
            *(
                f"{figure}_p99_ms_{name}",
                ours[1],
                peer[1],
                peer[1] / ours[1],
                "ms",
                runs,
                machine(),
            ),
            f"{note}; {corpus}; {each}",
            {"bytes": size, "prompts": count, "corpus": corpus},
            {"hyperscan_ms": bare[1], "p50_ms": ours[0], "peer_p50_ms": peer[0]},
        )
        for figure, corpus in (("input", slowest), ("contacts", DENSE))
        for ours, bare, peer in (by_corpus[corpus],)
    ]


def _input_path(inspector: Inspector) -> Search:
    return lambda text: verdict_on(list(inspector.begin("default", {}, [text]).results()))


def _bare_searches() -> tuple[Search, Search]:
    """The patterns of the default rules in one pass of hyperscan, and one by one with RE2."""
    patterns = [form.pattern for spec in default_rules() for form in spec.forms]
    together = Prefilter(patterns)
    one_by_one = [compiled(pattern.encode()) for pattern in patterns]

    def search_each(text: str) -> list[tuple[int, int]]:
        data = text.encode()
        return [match.span() for regex in one_by_one for match in regex.finditer(data)]

    return lambda text: together.present(text.encode()), search_each


def quantiles_ms(
    sides: Sequence[Search], texts: Sequence[str], runs: int
) -> list[tuple[float, float]]:
    """Of each side: p50 and p99 of the time for one prompt, milliseconds, medians over runs."""
    found = [[quantiles(took) for took in _took_ms(sides, texts)] for _ in range(runs)]
    return [
        (statistics.median(one[0] for one in side), statistics.median(one[1] for one in side))
        for side in zip(*found, strict=True)
    ]


def _took_ms(sides: Sequence[Search], texts: Sequence[str]) -> list[list[float]]:
    """All sides in turn on every text, after a warm-up."""
    took: list[list[float]] = [[] for _ in sides]
    for text in (*texts[:WARM_UP], *texts):
        for side, times in zip(sides, took, strict=True):
            start = time.thread_time()
            side(text)
            times.append((time.thread_time() - start) * 1000)
    return [times[WARM_UP:] for times in took]


def quantiles(times: Sequence[float]) -> tuple[float, float]:
    """p50 and p99."""
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


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


def measure_output(runs: int) -> Figure:
    """What the filter adds to a token, everything redacted, for the worst corpus; answers with and without in turn."""
    tokenizer = load_catalog(Settings())["small"].tokenizer
    policies = {"default": {}, "all redacted": {"default": "redact"}}
    loaded = load_policies_of(Settings(safety={"policies": _named(policies)}))
    texts = {
        corpus: [tokenizer.encode_text(t) for t in islice(prompts(lines, OUTPUT_BYTES), ANSWERS)]
        for corpus, lines in CORPORA.items()
    }
    medians: dict[str, dict[str, tuple[float, float]]] = {}
    for name in policies:
        output = loaded.by_name[name.replace(" ", "_")].output
        assert output is not None
        medians[name] = {
            corpus: _added_us(tokenizer, answers, output, runs) for corpus, answers in texts.items()
        }
    ours, peer = max(medians["all redacted"].values())
    each = "; ".join(
        f"{name}: " + ", ".join(f"{corpus} {us:.3g}" for corpus, (us, _) in by_corpus.items())
        for name, by_corpus in medians.items()
    )
    note = f"what the filter adds; peer: the same answers from id to text without it; {each}"
    return Figure("output_us_per_token", ours, peer, peer / ours, "us", runs, machine(), note)


def _added_us(
    tokenizer: ModelTokenizer, answers: Sequence[Sequence[int]], output: OutputRules, runs: int
) -> tuple[float, float]:
    """Medians: what the filter adds to a token, and what a token costs without it."""
    bare, added = [], []
    for _ in range(runs):
        bare.append(us_per_token(tokenizer, answers, None))
        added.append(us_per_token(tokenizer, answers, output) - bare[-1])
    return statistics.median(added), statistics.median(bare)


def us_per_token(
    tokenizer: ModelTokenizer, answers: Sequence[Sequence[int]], output: OutputRules | None
) -> float:
    """Microseconds for a token of an answer, from id to text."""
    start = time.thread_time()
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
    return (time.thread_time() - start) * 1e6 / sum(map(len, answers))


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


async def measure_mesh(runs: int) -> list[Figure]:
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
        return [
            await _compare("mesh_with_policy_vs_without", stub, MODEL, ANSWER_TOKENS, runs),
            await _compare("echo_with_policy_vs_without", stub, "echo", ECHO_TOKENS, runs),
        ]


async def _compare(figure: str, stub: "Stub", model: str, tokens: int, runs: int) -> Figure:
    def under(policy: str) -> Run:
        client = LabelledClient(stub, model, policy)
        return lambda: client.tokens_per_s(STREAMS, tokens)

    return await compare(
        figure,
        under("default"),
        under("off"),
        unit="tokens/s",
        higher_is_better=True,
        runs=runs,
        note=f"{STREAMS} callers, model {model}; peer: requests whose policy is switched off",
    )


if __name__ == "__main__":
    main()
