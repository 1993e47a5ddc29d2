"""The engine "openai": rows that somebody else's server computes, in a worker process without Triton."""
