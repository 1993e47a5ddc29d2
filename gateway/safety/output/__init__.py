"""The safety of what comes out: a filter in the stream that shows text as soon as no rule can still claim it."""
