"""One attempt at a stage: read its items, send them, write each outcome once.

Three loops share an `ItemWindow`: one adds items while there is room, one sends them, and one
writes what has come back as the next segment of the log (`jobs.stage_log`).
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from jobs.answers import DedupeCache
from jobs.core.pace import CostBudget, RateLimit
from jobs.core.retry import FailureKind, ItemRetryPolicy, failure_kind
from jobs.core.window import BLOCK, ItemWindow
from jobs.core.work import JobWork
from jobs.gateways import ItemCalls, error_in
from jobs.items import Item
from jobs.process import JobProcess, JobStopped, model_removed
from jobs.results import OrderedLog
from jobs.sources import Block, result_of
from jobs.stage_log import BAD_LINES, StageLog
from sluice.background import wait_for_event
from sluice.defaults import AUTO
from sluice.errors import JobUnknown, SluiceError, Unauthenticated, UnknownModel
from sluice.internal.v1.items_pb2 import RunResponse
from sluice.internal.v1.job_pb2 import ItemOutcome, JobRecord
from sluice.v1 import jobs_pb2 as pb
from sluice.v1.inference_pb2 import FINISH_REASON_STOP
from sluice.wire.clock import ms_of, timestamp, unix_ms

COMMIT_S: Final = 0.25
"""How long an outcome waits for others before it is written, in seconds."""
UNWRITTEN_MAX: Final = 2048
"""Outcomes waiting for JetStream at which nothing more is sent."""
OUTCOME_BYTES_MAX: Final = 192 * 1024
"""Largest answer of an item, in bytes, so that a segment fits into a message."""
ITEM_TIMEOUT_S: Final = 3600.0
"""Default timeout of an item, in seconds, long because it waits for idle capacity; gateways clamp it to theirs."""
NO_GATEWAY_WAIT_S: Final = 0.25
"""Pause of an item while no gateway is connected, in seconds."""
BAD_LINES_FROM: Final = 100
"""Lines that must be read before the share of bad ones is checked."""
BAD_LINE_SHARE: Final = 0.1
"""Default share of bad lines above which a job is paused."""


class _ChangeSignal:
    """A signal between loops that share state: whoever changes it notifies, whoever needs a change waits."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake everybody who waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, bound_s: float | None = None) -> None:
        """Wait for the next change, at most `bound_s` seconds."""
        await wait_for_event(self._changed, bound_s)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked after each change."""
        while not holds():
            await self.wait()


@dataclass(eq=False)
class StageAttempt:
    """One attempt at a stage.

    Attributes:
        process: the process of the job.
        record: the job.
        stage: number of the stage.
        metadata: tenant, API key and trace of the calls to gateways.
        cache: answers by input hash.
        work: counts what the items take of workers.
        spent: cost of earlier attempts and stages.
        window: its items in memory.
        log: what it writes.
        items_read: items and bad lines that were read.
        is_input_read: whether there are no more.
        bad_lines: lines that are no items.
        wait_reason: why the mesh accepts no items now; empty: it does.
        calls: the calls that carry its items.
        timeout_s: timeout of an item, in seconds.
        changed: notified whenever a loop may have something to do.
        models: models that existed when the job was created, or have answered an item since.
    """

    process: JobProcess
    record: JobRecord
    stage: int
    metadata: tuple[tuple[str, str], ...]
    cache: DedupeCache
    work: JobWork
    spent: float = 0.0

    def __post_init__(self) -> None:
        spec, now = self.record.job.spec, time.monotonic()
        self.log = StageLog(self.process, self.record, self.stage)
        self.window = ItemWindow(
            BLOCK,
            ItemRetryPolicy.of(spec.retries),
            RateLimit(spec.limits.requests_per_minute, now),
            RateLimit(spec.limits.tokens_per_minute, now),
            CostBudget(spec.limits.max_cost, self.spent),
        )
        self.calls = ItemCalls(
            self.process.gateways, self.metadata, self.on_response, self.on_returned
        )
        self.timeout_s = ms_of(spec.limits.item_timeout) / 1e3 or ITEM_TIMEOUT_S
        self.items_read = self.bad_lines = 0
        self.is_input_read = False
        self.wait_reason = ""
        self.models = set(self.record.models) - {"", AUTO}
        self._stops: JobStopped | None = None
        self.changed = _ChangeSignal()

    def set_concurrency(self, concurrency: int) -> None:
        """Set how many items it may have in flight from now on."""
        self.window.concurrency = concurrency
        self.changed.notify()

    async def load(self) -> None:
        """Continue from the log, and keep its former writer from writing on.

        Raises:
            TransportUnavailable: JetStream does not respond.
            StorageFull: JetStream is full.
            Fenced: another process wrote meanwhile.
        """
        await self.log.load()
        self.window.budget.consume(self.log.checkpoint.counts.cost, 0)
        self.bad_lines = self.log.checkpoint.counts.bad_lines

    async def run(self, blocks: AsyncIterator[Block], skipped: int = 0) -> None:
        """Run until every item has an outcome in the log. After a cancel, `flush` writes what has come back.

        Args:
            blocks: the items.
            skipped: items that `blocks` leave out; all have an outcome.

        Raises:
            JobStopped: it needs a person.
            Fenced: another process has claimed the job.
            StorageFull: JetStream is full, or the tenant has used its share of it.
            SluiceError: an error of JetStream or the input.
        """
        if self.log.checkpoint.complete:
            return
        self.items_read = skipped
        # Answers of earlier jobs are loaded first, so that identical items are not computed again.
        await self.load_answers(await self._reused_jobs())
        # Its own earlier answers are loaded beside the work: waiting for them would cost more.
        own = self.load_answers([self.record])
        loops = (own, self.read_input(blocks), self.send_items(), self.calls.run())
        writing = asyncio.ensure_future(self.write_outcomes())
        waiting = {writing, *map(asyncio.ensure_future, loops)}
        try:
            # The writer ends last; an error of any other loop ends them all.
            while not writing.done():
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        assert self.log.checkpoint.complete, "the loop that writes ends last"

    async def flush(self) -> None:
        """Write what has come back, after `run` was stopped; raise what the last write did."""
        await self.log.flush(at_end=self.is_at_end)

    # Reading.

    async def read_input(self, blocks: AsyncIterator[Block]) -> None:
        """Add the items to the window while there is room."""
        async for block in blocks:
            await self.changed.until(
                lambda: self.window.has_room(self.log.done.low_water, self.items_read)
            )
            fresh: Block = []
            # Bad lines have their outcome; other items may have been done before this process took over.
            for item in filter(self.register, block):
                if (answer := self.cache.get(item.input_hash)) is None:
                    fresh.append(item)
                else:  # of an identical item
                    self.settle(item, _shared(answer))
            self.window.add(fresh)
            self.check_bad_lines(BAD_LINES_FROM)
            self.changed.notify()
        self.is_input_read = True
        self.check_bad_lines(1)
        self.changed.notify()

    def register(self, item: Item) -> bool:
        """Count an item that was read, and write the outcome that it comes with; return whether it has none."""
        self.items_read += 1
        if item.position in self.log.done:
            return False
        if item.outcome is not None:
            self.bad_lines += item.outcome.error.reason in BAD_LINES
            self._write(item, item.outcome)
            return False
        if item.earlier_reason:
            self.log.earlier[item.position] = item.earlier_reason, item.earlier_bytes
        return True

    def check_bad_lines(self, least: int) -> None:
        """Raise JobStopped if too many of the lines, of which at least `least` were read, are bad."""
        if self.stage:
            return  # The first stage has checked them.
        limits = self.record.job.spec.limits
        limit = BAD_LINE_SHARE
        if limits.HasField("max_bad_line_share"):
            limit = limits.max_bad_line_share
        if self.items_read >= least and self.bad_lines > limit * self.items_read:
            raise JobStopped(
                "TOO_MANY_BAD_LINES",
                f"{self.bad_lines} of the first {self.items_read} lines are no items, more than a share of {limit:g}: "
                "`sluice batch dead-letters` shows them; submit a corrected file, or resume the job "
                "with a higher share",
            )

    async def _reused_jobs(self) -> list[JobRecord]:
        """Return the jobs whose answers may be reused; a deleted job has none."""
        jobs: list[JobRecord] = []
        for job_id in self.record.job.spec.dedupe.reuse_job_ids:
            with suppress(JobUnknown):
                jobs.append((await self.process.store.read(job_id))[0])
        return [record for record in jobs if record.job.tenant == self.record.job.tenant]

    async def load_answers(self, jobs: Sequence[JobRecord]) -> None:
        """Load the answers of jobs, for later items that are identical; only in the first stage, and unless disabled.

        A resumed job does not wait for those of its own log: they would save less than waiting
        costs.
        """
        if self.record.job.spec.dedupe.disabled or self.stage:
            return
        for record in jobs:
            for attempt in range(record.attempt + 1):
                log = OrderedLog(self.process.store, record.job.id, 0, attempt)
                async for outcome in log.unordered():
                    if outcome.input_hash and outcome.result.HasField("answer"):
                        self.cache.put(outcome.input_hash, outcome.result.answer)

    # Sending.

    async def send_items(self) -> None:
        """Send the items of the window when its limits allow it."""
        while True:
            now = time.monotonic()
            # A response has shown that the job needs a person.
            if self._stops is not None:
                raise self._stops
            # JetStream is slower than the workers: send nothing until it has caught up.
            if len(self.log.waiting) >= UNWRITTEN_MAX:
                await self.changed.until(lambda: len(self.log.waiting) < UNWRITTEN_MAX)
            elif (item := self.window.next_item(now)) is None:  # limits, or nothing waits
                await self.changed.wait(self.window.wait_s(now))
            # Each item goes to one gateway; without a connected one it waits a moment.
            elif self.calls.send(item, self.timeout_s):
                self.changed.notify()
            else:
                self.on_returned(item)

    def on_returned(self, item: Item) -> None:
        """Send an item again later: no gateway is connected, or the call that carried it is gone."""
        self.wait_reason = "no gateway responds"
        self.window.on_returned(item, time.monotonic() + NO_GATEWAY_WAIT_S)
        self.changed.notify()

    def on_response(self, item: Item, response: RunResponse) -> None:
        """Handle the response to an item."""
        self.work.add(response.work, time.monotonic())
        if response.HasField("error"):
            self._on_error(item, error_in(response))
        else:
            self._on_answer(item, response)
        self.changed.notify()

    def _on_answer(self, item: Item, response: RunResponse) -> None:
        self.wait_reason = ""
        answer = answer_of(response)
        if item.request.model not in ("", AUTO):
            self.models.add(item.request.model)
        usage = answer.usage
        item.tries += 1
        computed = usage.prompt_tokens + usage.completion_tokens
        # Identical items share the answer and cost nothing.
        followers = self.window.on_answer(item, computed, answer.cost)
        self.settle(item, answer)
        for follower in followers:
            follower.tries = item.tries
            self.settle(follower, _shared(answer))
        if item.input_hash:
            self.cache.put(item.input_hash, answer)

    def _on_error(self, item: Item, error: SluiceError) -> None:
        kind, now = failure_kind(error), time.monotonic()
        if isinstance(error, Unauthenticated):  # the key of the job was revoked or has expired
            code = error.metadata.get("problem", error.reason)
            self._stops = JobStopped(code, f"{error.message}; then resume the job with it")
        elif isinstance(error, UnknownModel) and item.request.model in self.models:
            self._stops = model_removed(item.request.model)
        if self._stops is not None:
            self.window.on_returned(item, now)
            return
        # Not the fault of the item: show operators what the job waits for.
        if kind is FailureKind.NO_CAPACITY:
            self.wait_reason = error.message
        dead = self.window.on_failure(item, kind, error.retry_after_s or 0.0, now, random.random())
        if dead:
            for dead_item in (item, *self.window.on_ended(item)):
                dead_item.tries = item.tries
                self._write(dead_item, pb.JobResult(attempts=item.tries, error=_item_error(error)))

    def settle(self, item: Item, answer: pb.JobAnswer) -> None:
        """Write the answer of an item, or a dead letter if it is too large."""
        size, result = answer.ByteSize(), pb.JobResult(attempts=item.tries)
        if size > OUTCOME_BYTES_MAX:
            message = f"the answer has {size} bytes, over the limit of {OUTCOME_BYTES_MAX}"
            error = pb.JobItemError(code=8, reason="RESULT_TOO_LARGE", message=message)
            result.error.CopyFrom(error)
        else:
            result.answer.CopyFrom(answer)
        self._write(item, result)

    def _write(self, item: Item, result: pb.JobResult) -> None:
        self.log.add(
            ItemOutcome(
                result=result_of(item, result),
                input_hash=item.input_hash,
                document=item.document,
                position=item.position,
                carried=item.carried,
            )
        )

    # Writing.

    async def write_outcomes(self) -> None:
        """Write outcomes in segments until every item has one."""
        while not self.log.checkpoint.complete:
            await self.changed.until(lambda: bool(self.log.waiting) or self.is_at_end)
            # A segment is cheaper the more outcomes it has: wait a moment for others.
            full_at = time.monotonic() + COMMIT_S
            while not (self.log.has_segment or self.is_at_end) and time.monotonic() < full_at:
                await self.changed.wait(full_at - time.monotonic())
            if self.log.waiting:
                self.process.quotas.check_bytes(self.record.job.tenant, "results")
            await self.log.append(self.log.take(), at_end=self.is_at_end)
            self.changed.notify()

    @property
    def is_at_end(self) -> bool:
        """Whether the input was read and every item has an outcome, written or not."""
        return self.is_input_read and not len(self.window)


def answer_of(response: RunResponse) -> pb.JobAnswer:
    """Return what a job stores of a response."""
    stored = pb.JobAnswer(cost=response.cost, finish_time=timestamp(unix_ms()))
    if response.HasField("embedded"):
        embedded = response.embedded
        stored.request_id, stored.model = embedded.request_id, embedded.model
        stored.finish_reason = FINISH_REASON_STOP
        stored.usage.CopyFrom(embedded.usage)
        stored.embeddings.extend(embedded.embeddings)
        return stored
    answer, finished = response.answer, response.answer.finished
    stored.request_id = answer.started.request_id
    stored.model = finished.model or answer.started.model
    stored.text, stored.reasoning = answer.text, answer.reasoning
    stored.finish_reason = finished.reason
    stored.usage.CopyFrom(finished.usage)
    stored.rules.extend(finished.rules)
    stored.logprobs.extend(answer.logprobs)
    return stored


def _shared(answer: pb.JobAnswer) -> pb.JobAnswer:
    shared = pb.JobAnswer()
    shared.CopyFrom(answer)
    shared.cost, shared.deduplicated = 0.0, True
    return shared


def _item_error(error: SluiceError) -> pb.JobItemError:
    return pb.JobItemError(
        code=error.code.value[0],
        reason=error.reason,
        message=error.message[:1000],
        request_id=error.metadata.get("request_id", ""),
    )
