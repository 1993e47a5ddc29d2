"""The rules of the safety layer. Pure functions: rules and a text in, findings out.

One pass over a text tells which patterns may occur; of those RE2 finds the places, and a
validator decides about each match (`ruleset`, `validators`). Then come the operator's lists
(`lexicon`), encoded payloads and repetitions (`payloads`), the score of indicators of injections
near each other (`indicators`), and which of overlapping findings remain (`ruleset`). Everything is
linear in the text.
"""
