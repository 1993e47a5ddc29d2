"""Safety of prompts and answers: normalization, rules, guard models, and the filter of streamed answers."""
