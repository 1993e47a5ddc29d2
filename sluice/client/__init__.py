"""The client of a Sluice mesh, with asyncio (`AsyncClient`) and without (`Client`).

    with Client() as client:
        for event in client.generate("Sort: 7 3 12", model="small", timeout_s=30):
            if isinstance(event, Delta):
                print(event.text, end="")

    answer = client.generate("Sort: 7 3 12").answer()
    batch = client.generate_batch(["Sort: 2 1", "Sort: 9 8"])
    print(answer.text, answer.tier, answer.usage.completion_tokens)
    print([answer.text for answer in batch.answers], batch.tokens_per_s)

A call with one response returns its message, a class of `sluice.v1`, or the only field of it. What the client assembles
from several messages, such as an answer, its events or embeddings, is a frozen dataclass. An answer whose stream breaks
off is resumed at the same token. Errors are the classes of `sluice.errors`.
"""

from sluice.client.aio import AsyncAnswerStream, AsyncClient
from sluice.client.answer import (
    Answer,
    AnswerBuilder,
    Delta,
    Event,
    Finished,
    FinishReason,
    Notice,
    NoticeKind,
    Route,
    Started,
    Timings,
)
from sluice.client.batch import AnswerBatch
from sluice.client.blocking import AnswerStream, Client
from sluice.client.channel import ConnectionLost
from sluice.client.request import (
    Audio,
    GenerateOptions,
    Message,
    PriorityName,
    Prompt,
    SamplingOptions,
    TextOptions,
    Tool,
)
from sluice.client.retry import RetryPolicy
from sluice.client.texts import Embeddings
from sluice.v1.inference_pb2 import ModelUsage, TokenLogprob, TokenLogprobs, ToolCall, Usage

__all__ = [
    "Answer",
    "AnswerBatch",
    "AnswerBuilder",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncClient",
    "Audio",
    "Client",
    "ConnectionLost",
    "Delta",
    "Embeddings",
    "Event",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "Message",
    "ModelUsage",
    "Notice",
    "NoticeKind",
    "PriorityName",
    "Prompt",
    "RetryPolicy",
    "Route",
    "SamplingOptions",
    "Started",
    "TextOptions",
    "Timings",
    "TokenLogprob",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "Usage",
]
