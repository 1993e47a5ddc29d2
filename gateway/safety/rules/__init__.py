"""The rules of the safety layer. Pure functions: rules and a text in, findings out.

One pass over a text tells which patterns may occur; of those RE2 finds the places, and a
validator decides about each match (`ruleset`, `validators`). Indicators of injections near each
other are scored together (`indicators`). Then come encoded payloads and repetitions (`payloads`),
the operator's lists (`lexicon`), and which of overlapping findings remain (`ruleset`). Time is
linear in the text, apart from sorting the findings.
"""
