"""One pass over the items of a stage: reads them, sends them, writes each outcome once.

Three loops share a `Window`: one adds items while there is room, one sends them, one writes what has come back as the
next segment of the log (`jobs.pass_log`).
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Final

from jobs.answers import AnswerCache
from jobs.core.pace import Budget, Rate
from jobs.core.retry import Failure, RetryPolicy, failure_of
from jobs.core.window import BLOCK, Entry, Window
from jobs.core.work import JobWork
from jobs.gateways import ItemCalls, error_in
from jobs.pass_log import BAD_LINES, PassLog
from jobs.process import JobProcess, JobStops, model_removed
from jobs.results import OrderedLog
from jobs.sources import Block
from sluice.defaults import AUTO
from sluice.errors import JobUnknown, SluiceError, Unauthenticated, UnknownModel
from sluice.internal.v1.items_pb2 import RunResponse
from sluice.internal.v1.job_pb2 import ItemOutcome, JobRecord
from sluice.v1.inference_pb2 import FINISH_REASON_STOP
from sluice.v1.jobs_pb2 import JobAnswer, JobItemError, JobResult
from sluice.wire.clock import ms_of, timestamp, unix_ms

COMMIT_S: Final = 0.25
"""How long an outcome waits for others before it is written."""
UNWRITTEN_MAX: Final = 2048
"""Outcomes that may wait for JetStream; above it nothing is sent."""
OUTCOME_BYTES_MAX: Final = 192 * 1024
ITEM_TIMEOUT_S: Final = 3600.0
"""The timeout of an item that waits for what interactive traffic leaves, seconds; gateways cut it to theirs."""
NO_GATEWAY_WAIT_S: Final = 0.25
BAD_LINES_FROM: Final = 100
BAD_LINE_SHARE: Final = 0.1


class StagePass:
    """One pass.

    Attributes:
        window: its items in memory.
        log: what it writes.
        read: items and bad lines that were read.
        read_all: whether there are no more.
        trouble: why the mesh takes no items now; empty: it does.
        models: that were there when the job was created, or have answered an item since.
    """

    def __init__(
        self,
        process: JobProcess,
        record: JobRecord,
        stage: int,
        metadata: tuple[tuple[str, str], ...],
        cache: AnswerCache,
        spent: float = 0.0,
        work: JobWork | None = None,
    ) -> None:
        """``metadata``: tenant and trace of the calls to gateways. ``spent``: what earlier passes have cost.

        ``work``: counts what the items take of workers.
        """
        self._work = work or JobWork()
        self._process = process
        self._record = record
        self._cache = cache
        limits = record.job.spec.limits
        self.log = PassLog(process, record, stage)
        self._stage = stage
        now = time.monotonic()
        self._budget = Budget(limits.max_cost)
        self._budget.took(spent, 0)
        self.window = Window(
            BLOCK,
            RetryPolicy.of(record.job.spec.retries),
            Rate(limits.requests_per_minute, now),
            Rate(limits.tokens_per_minute, now),
            self._budget,
        )
        self._calls = ItemCalls(process.gateways, metadata, self._on_response, self._on_returned)
        timeout_ms = ms_of(limits.item_timeout)
        self._timeout_s = timeout_ms / 1e3 or ITEM_TIMEOUT_S
        self.read = 0
        self.read_all = False
        self._bad = 0
        self.trouble = ""
        self.models = set(record.models) - {"", AUTO}
        self._stops: JobStops | None = None
        self._changed = asyncio.Event()

    def set_concurrency(self, concurrency: int) -> None:
        """How many items it may have in flight from now on."""
        self.window.concurrency = concurrency
        self._wake()

    def set_max_cost(self, max_cost: float) -> None:
        """What the job may cost from now on; 0: anything."""
        self._budget.most = max_cost
        self._wake()

    async def load(self) -> None:
        """Takes over where the log is, and keeps whoever wrote it from writing on.

        Raises:
            TransportUnavailable, StorageFull, Fenced.
        """
        await self.log.load()
        self._budget.took(self.log.counts.cost, 0)
        self._bad = self.log.counts.bad_lines

    async def run(self, blocks: AsyncIterator[Block], skipped: int = 0) -> None:
        """Returns when every item has an outcome in the log. When it is stopped, it writes what has come back.

        ``skipped``: items that ``blocks`` leave out; all have an outcome.

        Raises:
            JobStops: it needs a person.
            Fenced: another process has taken the job.
            StorageFull: JetStream is full, or the tenant has its share of it.
            SluiceError: JetStream or the input.
        """
        if self.log.complete:
            return
        self.read = skipped
        await self._fill_cache(await self._logs_of_others())
        own = self._fill_cache([(self.log.key[0], one) for one in range(self.log.key[2] + 1)])
        loops = [own, self._feed(blocks), self._send(), self._calls.run(), self._write()]
        tasks = [asyncio.ensure_future(loop) for loop in loops]
        try:
            await _first_end(tasks, tasks[-1])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert self.log.complete, "the loop that writes ends last"

    async def flush(self) -> None:
        """Writes what has come back, after `run` was stopped. Raises what the last write did."""
        await self.log.flush(at_end=self._at_end)

    # Reading.

    async def _feed(self, blocks: AsyncIterator[Block]) -> None:
        async for block in blocks:
            await self._until(self._has_room)
            fresh = [one for one in map(self._count, block) if one is not None]
            self.window.add([one for one in fresh if not self._settle_known(one)])
            self._check_bad_lines(BAD_LINES_FROM)
            self._wake()
        self.read_all = True
        self._check_bad_lines(1)
        self._wake()

    def _has_room(self) -> bool:
        return self.window.has_room(self.log.done.low_water, self.read)

    def _count(self, one: Entry | ItemOutcome) -> Entry | None:
        """``one`` when it is an item without an outcome."""
        self.read += 1
        if one.place in self.log.done:
            return None
        if isinstance(one, ItemOutcome):
            self._bad += one.result.error.reason in BAD_LINES
            self.log.add(one)
            return None
        if one.earlier_reason:
            self.log.earlier_reasons[one.place] = one.earlier_reason
            self.log.earlier_bytes[one.place] = one.earlier_bytes
        return one

    def _settle_known(self, entry: Entry) -> bool:
        """Whether an identical item has an answer already."""
        known = self._cache.get(entry.input_hash) if entry.input_hash else None
        if known is not None:
            self._settle_answer(entry, _shared(known))
        return known is not None

    def _check_bad_lines(self, least: int) -> None:
        if self._stage:
            return  # they were judged in the first one
        limits = self._record.job.spec.limits
        most = BAD_LINE_SHARE
        if limits.HasField("max_bad_line_share"):
            most = limits.max_bad_line_share
        if self.read >= least and self._bad > most * self.read:
            raise JobStops(
                "TOO_MANY_BAD_LINES",
                f"{self._bad} of the first {self.read} lines are no items, more than a share of {most:g}:"
                " `sluice batch dead-letters` shows them; submit a mended file, or resume the job with a higher share",
            )

    async def _logs_of_others(self) -> list[tuple[str, int]]:
        """Jobs and rounds whose answers may be taken; a job that was deleted since has none."""
        logs: list[tuple[str, int]] = []
        for other in self._record.job.spec.dedupe.reuse_job_ids:
            try:
                record, _ = await self._process.store.read(other)
            except JobUnknown:
                continue
            if record.job.tenant == self._record.job.tenant:
                logs += [(other, one) for one in range(record.round + 1)]
        return logs

    async def _fill_cache(self, logs: Sequence[tuple[str, int]]) -> None:
        """With the answers of jobs and rounds, for later items that are identical.

        A job that goes on does not wait for those of its own log: what they would have saved meanwhile is less.
        """
        if self._record.job.spec.dedupe.disabled or self._stage:
            return
        for job, round_ in logs:
            async for outcome in OrderedLog(self._process.store, job, 0, round_).everything():
                if outcome.input_hash and outcome.result.HasField("answer"):
                    self._cache.put(outcome.input_hash, outcome.result.answer)

    # Sending.

    async def _send(self) -> None:
        while True:
            now = time.monotonic()
            if self._stops is not None:
                raise self._stops
            if len(self.log.waiting) >= UNWRITTEN_MAX:
                await self._until(lambda: len(self.log.waiting) < UNWRITTEN_MAX)
            elif (entry := self.window.next(now)) is None:
                await self._pause(self.window.wait_s(now))
            elif self._calls.send(entry, self._timeout_s):
                self._wake()
            else:
                self.window.returned(entry, now + NO_GATEWAY_WAIT_S)

    def _on_returned(self, entry: Entry) -> None:
        self.trouble = "no gateway answers"
        self.window.returned(entry, time.monotonic() + NO_GATEWAY_WAIT_S)
        self._wake()

    def _on_response(self, entry: Entry, response: RunResponse) -> None:
        self._work.add(response.work, time.monotonic())
        if response.HasField("error"):
            self._on_error(entry, error_in(response))
        else:
            self._on_answer(entry, response)
        self._wake()

    def _on_answer(self, entry: Entry, response: RunResponse) -> None:
        self.trouble = ""
        answer = answer_of(response)
        if entry.request.model not in ("", AUTO):
            self.models.add(entry.request.model)
        usage = answer.usage
        entry.tries += 1
        computed = usage.prompt_tokens + usage.completion_tokens
        followers = self.window.answered(entry, computed, answer.cost)
        self._settle_answer(entry, answer)
        for follower in followers:
            follower.tries = entry.tries
            self._settle_answer(follower, _shared(answer))
        if entry.input_hash:
            self._cache.put(entry.input_hash, answer)

    def _on_error(self, entry: Entry, error: SluiceError) -> None:
        kind, now = failure_of(error), time.monotonic()
        if isinstance(error, Unauthenticated):  # the key of the job is not taken any more
            code = error.metadata.get("problem", error.reason)
            self._stops = JobStops(code, f"{error.message}; then resume the job with it")
        elif isinstance(error, UnknownModel) and entry.request.model in self.models:
            self._stops = model_removed(entry.request.model)
        if self._stops is not None:
            self.window.returned(entry, now)
            return
        if kind is Failure.NO_ROOM:
            self.trouble = error.message
        dead = self.window.failed(entry, kind, error.retry_after_s or 0.0, now, random.random())
        if dead:
            for one in (entry, *self.window.died(entry)):
                one.tries = entry.tries
                self.log.add(_outcome(one, error=_item_error(error)))

    def _settle_answer(self, entry: Entry, answer: JobAnswer) -> None:
        if answer.ByteSize() > OUTCOME_BYTES_MAX:
            message = f"the answer has {answer.ByteSize()} bytes, a job keeps {OUTCOME_BYTES_MAX}"
            error = JobItemError(code=8, reason="RESULT_TOO_LARGE", message=message)
            self.log.add(_outcome(entry, error=error))
        else:
            self.log.add(_outcome(entry, answer=answer))

    # Writing.

    async def _write(self) -> None:
        while not self.log.complete:
            await self._until(lambda: bool(self.log.waiting) or self._at_end)
            full_at = time.monotonic() + COMMIT_S
            while not (self.log.has_segment or self._at_end) and time.monotonic() < full_at:
                await self._pause(full_at - time.monotonic())
            if self.log.waiting:
                self._process.quotas.check_results(self._record.job.tenant)
            await self.log.append(self.log.take(), at_end=self._at_end)
            self._wake()

    @property
    def _at_end(self) -> bool:
        return self.read_all and not len(self.window)

    # Waiting.

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    async def _pause(self, bound_s: float | None) -> None:
        """Until something changes, ``bound_s`` seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                await self._changed.wait()


async def _first_end(tasks: list[asyncio.Task[None]], last: asyncio.Task[None]) -> None:
    """Returns when ``last`` has ended; raises what ends another one before."""
    waiting = set(tasks)
    while not last.done():
        ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    last.result()


def answer_of(response: RunResponse) -> JobAnswer:
    """What a job keeps of an answer."""
    if response.HasField("embedded"):
        found = response.embedded
        return JobAnswer(
            request_id=found.request_id,
            model=found.model,
            finish_reason=FINISH_REASON_STOP,
            usage=found.usage,
            cost=response.cost,
            finish_time=timestamp(unix_ms()),
            embeddings=found.embeddings,
        )
    answer = response.answer
    return JobAnswer(
        request_id=answer.started.request_id,
        model=answer.finished.model or answer.started.model,
        text=answer.text,
        reasoning=answer.reasoning,
        finish_reason=answer.finished.reason,
        usage=answer.finished.usage,
        rules=answer.finished.rules,
        logprobs=answer.logprobs,
        cost=response.cost,
        finish_time=timestamp(unix_ms()),
    )


def _shared(answer: JobAnswer) -> JobAnswer:
    shared = JobAnswer()
    shared.CopyFrom(answer)
    shared.cost, shared.deduplicated = 0.0, True
    return shared


def _item_error(error: SluiceError) -> JobItemError:
    return JobItemError(
        code=error.code.value[0],
        reason=error.reason,
        message=error.message[:1000],
        request_id=error.metadata.get("request_id", ""),
    )


def _outcome(
    entry: Entry, answer: JobAnswer | None = None, error: JobItemError | None = None
) -> ItemOutcome:
    result = JobResult(
        index=entry.index,
        line=entry.line,
        custom_id=entry.custom_id,
        url=entry.url,
        attempts=entry.tries,
        part=entry.part,
        parts=entry.parts,
        answer=answer,
        error=error,
    )
    return ItemOutcome(
        result=result,
        input_hash=entry.input_hash,
        document=entry.document,
        place=entry.place,
    )
