"""The runs of long audio: one for each chunk, a few at a time. Their joined tokens are the answer.

The stream of the request waits for a run that no batcher has: its frames are made here, in order, from the results of
the chunks. These are runs like any other, recovered by themselves when a worker is lost. A stream that continues an
earlier one gets all frames again, and drops what its caller has.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from gateway.admission.request_context import RequestContext
from gateway.models.speech import JoinedTexts
from gateway.streaming.answer_stream import AnswerStream
from gateway.streaming.model_run import ModelRun, ResultCollector
from gateway.upstream.runs import Upstream, spawn_beside
from sluice.internal.v1.frame_pb2 import TASK_END_LENGTH, TASK_END_STOP, Frame
from sluice.v1.inference_pb2 import FINISH_REASON_LENGTH, SamplingParams

CONCURRENT_MAX: Final = 8
"""Chunks of a request that are computed at a time: each is almost a megabyte in NATS, batcher and worker."""


class ChunkRuns:
    """The runs of one request's chunks."""

    def __init__(self, upstream: Upstream, context: RequestContext, run: ModelRun) -> None:
        """Prepare to answer `run` of the request from those of its chunks."""
        self._upstream = upstream
        self._context = context
        self._run = run
        (self._prepared,) = context.prompts
        # Stop strings are those of the joined text.
        self._request = replace(context.request, sampling=SamplingParams())
        self._joined = JoinedTexts()
        self._slots = asyncio.Semaphore(CONCURRENT_MAX)
        self._sent_tokens = 0
        self._recoveries = 0
        self._is_cut = False
        """Whether a chunk's text was longer than the decoder has room for."""

    def start(self, stream: AnswerStream) -> None:
        """Send the runs of the first chunks; the others follow as these end."""
        self._run.is_sent = True
        spawn_beside(stream, self._answer)
        self._upstream.registry.accept_task(self._run.run_id)

    async def _answer(self) -> None:
        headers = self._context.log.run_sent(self._run.run_id, self._run.model)
        numbers = range(len(self._prepared.chunks))
        try:
            async with asyncio.TaskGroup() as group:
                for chunk in [group.create_task(self._compute(n, headers)) for n in numbers]:
                    self._take(await chunk)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        self._add_frame(self._joined.end(), is_last=True)

    async def _compute(self, number: int, headers: Mapping[str, str]) -> ResultCollector:
        """Return the result of a chunk."""
        upstream, prepared = self._upstream, self._prepared.chunks[number]
        run_id = f"{self._context.request_id}-c{number}"
        async with self._slots:
            run = upstream.new_run(self._request, prepared, run_id, self._context.deadline)
            run.headers = headers
            (result,) = await upstream.compute([run])
        return result

    def _take(self, result: ResultCollector) -> None:
        """Add the next chunk in order to the answer."""
        speech = self._prepared.model.tokenizer.speech
        assert speech is not None, "it takes audio"
        token_ids = list(result.current.token_ids)
        self._is_cut |= result.reason == FINISH_REASON_LENGTH
        self._recoveries += result.current.recoveries
        if not self._sent_tokens:
            # The language, which others may have found otherwise, begins the answer of one chunk too.
            self._add_frame(token_ids[: self._opening_tokens])
        words = [
            token for token in token_ids[self._opening_tokens :] if token not in speech.control
        ]
        self._add_frame(self._joined.add(words))

    @property
    def _opening_tokens(self) -> int:
        """Tokens of a chunk's answer before its text."""
        audio = self._prepared.chunks[0].audio
        assert audio is not None
        return 1 + len(audio.opening_token_ids) if audio.opening_token_ids else 0

    def _add_frame(self, token_ids: list[int], *, is_last: bool = False) -> None:
        run, left = self._run, self._prepared.sampling.max_tokens - self._sent_tokens
        is_full = len(token_ids) >= left
        # A higher attempt notifies the caller that another process has continued.
        run.attempt_number = self._recoveries
        frame = Frame(
            request_id=run.run_id,
            attempt=run.attempt_number,
            start_index=self._sent_tokens,
            token_ids=token_ids[:left],
        )
        if is_last or is_full:
            is_cut = is_full or self._is_cut
            frame.final.end = TASK_END_LENGTH if is_cut else TASK_END_STOP
        self._sent_tokens += len(frame.token_ids)
        if frame.token_ids or is_last:
            self._upstream.registry.accept(frame, time.monotonic())
