"""The rules of the safety layer. Pure functions: rules and a text in, findings out.

One pass over a text tells which patterns may occur; of those RE2 finds the places, and a
validator decides about each match (`scanner`, `validators`). Then come the operator's lists
(`lexicon`), encoded payloads (`payloads`), the score of indicators of injections near each other
(`scoring`), the limits (`limits`), and which of overlapping findings remain (`ruleset`). Everything
is linear in the text.
"""
