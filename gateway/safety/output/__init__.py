"""Output safety: a streaming filter that releases text as soon as no rule can match it any more."""
