"""The engine "openai": sequences that an upstream server computes, in a worker process without Triton."""
