"""Constraints and patterns that are expensive to compile: those of attacks, and those that trackers call slow."""

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
    # A list of texts whose length is bounded too: https://github.com/guidance-ai/llguidance/issues/108.
    "listed texts with a length": (
        "json_schema",
        json.dumps(
            {"type": "string", "maxLength": 4, "enum": [f"{at:04}" for at in range(0, 9800, 2)]}
        ),
    ),
    # Large lists in many places: https://github.com/guidance-ai/llguidance/issues/98.
    "large lists": (
        "json_schema",
        json.dumps(
            {
                "anyOf": [
                    {"properties": {f"p{part}": {"enum": [f"{part}-{at}" for at in range(60)]}}}
                    for part in range(60)
                ]
            }
        ),
    ),
    # Long texts: https://github.com/mlc-ai/xgrammar/issues/852.
    "long texts": (
        "json_schema",
        json.dumps(
            {
                "properties": {
                    f"p{at}": {"type": "string", "minLength": 1, "maxLength": 100_000 + at}
                    for at in range(30)
                }
            }
        ),
    ),
    # 16,387 states: https://github.com/sgl-project/sglang/pull/40373 (interegular).
    "a letter with others behind": ("regex", "[ab]*a[ab]{13}"),
    # A count that overlaps what is before it: https://github.com/Genivia/ugrep/issues/555.
    "overlapping counts": ("regex", '[^"]*coder[^"]{0,300}'),
    # Exponential automata: the n-th letter before the end.
    "letter before the end": ("regex", r"(.*a.{30})*b"),
    "intersection in a grammar": (
        "grammar",
        "start: A\nA: " + " & ".join(f"/.*{c}.{{9}}{c}.*/" for c in "abcdefgh"),
    ),
}

PATTERNS: Final[dict[str, tuple[str, str]]] = {
    # https://github.com/intel/hyperscan/issues/132; 73 are too many for hyperscan with Unicode.
    "counted characters": ("x.{73}", ""),
    "many counted characters": ("x.{1000}", ""),
    # https://github.com/intel/hyperscan/issues/425: ended the process.
    "largest count of hyperscan": ("abc .{0,32767}", "invalid repetition size: {0,32767}"),
    # https://github.com/google/re2/issues/405
    "above the largest count of RE2": ("a{0,2048}", "invalid repetition size: {0,2048}"),
    "largest count of RE2": ("a.{0,1000}b", ""),
    # https://github.com/uhop/node-re2/issues/206
    "counts in counts": ("(g{2,32}|q){1,32}", "invalid repetition size: {1,32}"),
    # https://github.com/PCRE2Project/pcre2/issues/119
    "counted alternatives": ("([A-Z]|[0-9]|[xyz]){1,1000}", ""),
    # https://github.com/intel/hyperscan/issues/395
    "address": (r"[a-zA-Z0-9_ -]{5,30}@[a-zA-Z0-9_ -]{1,20}(\.[a-zA-Z0-9_ -]{1,20}){1,5}", ""),
    # https://github.com/Genivia/ugrep/issues/555
    "overlapping counts": ('[^"]{0,900}coder[^"]{0,900}', ""),
    # https://github.com/intel/hyperscan/issues/9
    "many alternatives": (
        "|".join(f"word{at}[0-9]{{2,10}}" for at in range(900)),
        "more than 6000 characters when written out",
    ),
    "no bound": ("a.*b", "position 2: a repeat without an upper bound"),
    "deep": ("(" * 51 + "a" + ")" * 51, "position 50: more than 50 nested groups"),
    "long": ("a" * 2001, "matches of up to 2001 characters; at most 2000"),
    "optional": ("a?" * 900 + "a" * 900, ""),
    "any letters": (r"[\x{0}-\x{10ffff}]{1,1000}", ""),
}
"""Of rules: the pattern, and the begin of what is said of it; empty: every engine takes it."""
