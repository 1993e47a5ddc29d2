"""What the safety layer costs a prompt: the whole input path (normalize, look with all default rules, decide) on one
core, for ordinary text of 1 kB and 32 kB. Ours is the 99th percentile; the peer is the bound that the project set.

    python bench/safety.py [--json] [--runs N]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import MIN_RUNS, Figure, emit, machine
from gateway.policies import load_inspector
from gateway.safety.inspector import Inspector, verdict_on
from sluice.settings import Settings

SIZES: Final = (("1kb", 1_000, 0.3, 1_000), ("32kb", 32_000, 3.0, 200))
"""Name, UTF-8 bytes of a prompt, the bound in milliseconds, prompts of a run."""

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
"""Not ordinary, so it is told beside the figure: an e-mail address and a telephone number every 300 characters."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=MIN_RUNS)
    options = parser.parse_args()
    inspector = load_inspector(Settings())
    emit([measure(inspector, *size, options.runs) for size in SIZES], options.json)


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


if __name__ == "__main__":
    main()
