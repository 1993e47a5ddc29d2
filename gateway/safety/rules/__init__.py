"""What an inspection looks for. Pure functions: rules and a text in, findings out.

A text goes once through one automaton of all patterns (`prefilter`), which says what occurs; only for that RE2 says
where (`forms`), and a validator per candidate whether it is one (`validators`). Then come the operator's lists
(`lexicon`), what hides in an encoding (`payloads`), how signs of an injection add up (`scoring`), the limits, and
which of overlapping findings stand (`overlaps`). Everything is linear in the text.
"""
