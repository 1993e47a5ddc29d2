"""Constraints that are expensive to compile: those of an attack, and those that trackers of compilers call slow."""

import json
from typing import Final

_FILES: Final = r"(Path: `Shop\.{}/Service\.cs`\n\n```cs\n(\n|[^`].*?\n)*```\n\n)?"

SLOW: Final[dict[str, tuple[str, str]]] = {
    # Found by attack.
    "multiple of a large number": ("json_schema", '{"type":"integer","multipleOf":100000007}'),
    "product of multiples": (
        "json_schema",
        json.dumps({"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}),
    ),
    "many patterns at once": (
        "json_schema",
        json.dumps(
            {
                "type": "string",
                "allOf": [
                    {"pattern": f".*{chr(97 + i)}{{{i + 1}}}.*{chr(98 + i)}"} for i in range(20)
                ],
            }
        ),
    ),
    # Many optional blocks with a nested repetition: https://github.com/dottxt-ai/outlines/issues/680 (interegular).
    "optional files": ("regex", "".join(_FILES.format(name) for name in "ABCDEFGH") + "END\n"),
    # Long classes with counts: https://github.com/dottxt-ai/outlines/issues/506 (interegular).
    "counted words": ("regex", r"([A-Za-z0-9 ,.'-]{1,80}\n){1,40}"),
    # Counted repetitions over all of Unicode: https://github.com/intel/hyperscan/issues/132.
    "counted characters": ("regex", r"x.{4000}"),
    # The largest count that hyperscan knows: https://github.com/intel/hyperscan/issues/425.
    "largest count": ("regex", r"abc .{0,32767}"),
    # An address with counted parts in a counted group: https://github.com/intel/hyperscan/issues/395.
    "address": ("regex", r"[a-zA-Z0-9_ -]{5,30}@[a-zA-Z0-9_ -]{1,20}(\.[a-zA-Z0-9_ -]{1,20}){1,5}"),
    # Exponential automata: the n-th letter before the end.
    "letter before the end": ("regex", r"(.*a.{30})*b"),
    "intersection in a grammar": (
        "grammar",
        "start: A\nA: " + " & ".join(f"/.*{c}.{{9}}{c}.*/" for c in "abcdefgh"),
    ),
}
