"""The rows of long audio: one for each chunk, a few at a time. Their joined tokens are the answer.

The stream of the request waits for a row that no batcher has: its frames are made here, in order, from what the rows of
the chunks say. Those are rows as any other, recovered by themselves when a worker is lost. A stream that continues an
earlier one gets all frames again, and drops what its caller has.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from gateway.admission.request_context import RequestContext
from gateway.models.speech import JoinedTexts
from gateway.streaming.answer import Answer
from gateway.streaming.row import Row
from gateway.upstream.rows import Beside, InternalRow, Upstream
from sluice.internal.v1.frame_pb2 import TASK_END_LENGTH, TASK_END_STOP, Frame
from sluice.v1.inference_pb2 import FINISH_REASON_LENGTH, SamplingParams

AT_ONCE: Final = 8
"""Chunks of a request that are computed at a time: each is almost a megabyte in NATS, batcher and worker."""


class ChunkRows(Beside):
    """Those of one request."""

    _sent = 0
    _recoveries = 0
    _cut = False
    """Whether a chunk's text was longer than the decoder has room for."""

    def __init__(self, upstream: Upstream, context: RequestContext, attempt: Row) -> None:
        super().__init__()
        self._upstream = upstream
        self._context = context
        self._attempt = attempt
        self._prepared = context.first
        # Stop strings are those of the joined text.
        self._request = replace(context.request, sampling=SamplingParams())
        self._joined = JoinedTexts()
        self._room = asyncio.Semaphore(AT_ONCE)

    def start(self, answer: Answer) -> None:
        """Sends the rows of the first chunks; the others follow as these end."""
        self._attempt.sent = True
        self.spawn(answer, self._answer)
        self._upstream.registry.published(self._attempt.row_id)

    async def _answer(self) -> None:
        row = self._attempt
        headers = self._context.log.run_sent(row.row_id, row.model)
        numbers = range(len(self._prepared.chunks))
        try:
            async with asyncio.TaskGroup() as group:
                for chunk in [group.create_task(self._chunk(one, headers)) for one in numbers]:
                    self._take(await chunk)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        self._frame(self._joined.end(), ended=True)

    async def _chunk(self, number: int, headers: Mapping[str, str]) -> InternalRow:
        """A chunk's row that has ended."""
        prepared, row_id = self._prepared.chunks[number], f"{self._context.request_id}-c{number}"
        deadline = self._context.deadline
        async with self._room:
            row = InternalRow(self._upstream, self._request, prepared, row_id, deadline, headers)
            await InternalRow.answer(row)
        return row

    def _take(self, row: InternalRow) -> None:
        """The next chunk in order is complete."""
        speech = self._prepared.model.speech
        assert speech is not None, "it takes audio"
        said = list(row.attempt.token_ids)
        self._cut |= row.result.reason == FINISH_REASON_LENGTH
        self._recoveries += row.attempt.recoveries
        if not self._sent:
            # The language, which others may have found otherwise, begins the answer of one chunk too.
            self._frame(said[: self._opening])
        words = [token for token in said[self._opening :] if token not in speech.control]
        self._frame(self._joined.add(words))

    @property
    def _opening(self) -> int:
        """Tokens of a chunk's answer before its text."""
        audio = self._prepared.chunks[0].audio
        assert audio is not None
        return 1 + len(audio.opening_token_ids) if audio.opening_token_ids else 0

    def _frame(self, token_ids: list[int], *, ended: bool = False) -> None:
        room = self._prepared.sampling.max_tokens - self._sent
        full = len(token_ids) >= room
        # A higher attempt tells the caller that another process has continued.
        frame = Frame(
            request_id=self._attempt.row_id,
            attempt=self._recoveries,
            start_index=self._sent,
            token_ids=token_ids[:room],
        )
        if ended or full:
            frame.final.end = TASK_END_LENGTH if full or self._cut else TASK_END_STOP
        self._sent += len(frame.token_ids)
        if frame.token_ids or ended:
            self._upstream.registry.accept(frame, time.monotonic())
