# /// script
# dependencies = [
#   "langfuse==5.0.4",
#   "openai==3.57.0",
#   "openinference-instrumentation-openai==0.1.66",
#   "opentelemetry-sdk",
# ]
# ///
"""Langfuse's and OpenInference's wrappers of openai: what they write down of a chat, whole and streamed."""

import os
import sys
from typing import Any

os.environ["LANGFUSE_TRACING_ENABLED"] = "false"
os.environ["LANGFUSE_PUBLIC_KEY"] = os.environ["LANGFUSE_SECRET_KEY"] = "none"

from langfuse.openai import OpenAI as LangfuseOpenAI
from openai import OpenAI
from openinference.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

SORT: dict[str, Any] = {
    "model": "small",
    "messages": [{"role": "user", "content": "Sort ascending: 31, 7, 19"}],
}


def sorts(client: Any) -> int:
    """Sort numbers, whole and streamed; return the tokens of the whole answer."""
    whole = client.chat.completions.create(**SORT)
    assert whole.choices[0].message.content == "7, 19, 31"
    pieces = client.chat.completions.create(
        **SORT, stream=True, stream_options={"include_usage": True}
    )
    said = [choice.delta.content or "" for piece in pieces for choice in piece.choices]
    assert "".join(said) == "7, 19, 31"
    return int(whole.usage.total_tokens)


access: dict[str, Any] = {"base_url": sys.argv[1], "api_key": "none", "max_retries": 0}
sorts(LangfuseOpenAI(**access))
written = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(written))
OpenAIInstrumentor().instrument(tracer_provider=provider)
total = sorts(OpenAI(**access))
spans = written.get_finished_spans()
assert [(span.attributes or {})["llm.token_count.total"] for span in spans] == [total, total]
