"""Jobs with stages: long texts in parts, and the answers of a stage as the texts of the next one.

An item of the first stage is a part of a document; an item of a later one has the answers of a
document, or a part of them if they are too long. The last stage is repeated until each document has
one answer. If a part is a dead letter, so is its document.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import grpc

from jobs.answers import input_hash
from jobs.core.retry import FailureKind, failure_kind
from jobs.core.split import split
from jobs.core.window import BLOCK, BLOCK_BYTES
from jobs.input import Template
from jobs.items import Item
from jobs.process import JobProcess, model_removed
from jobs.results import merge_attempts
from jobs.sources import (
    REASON_CHARS_MAX,
    Block,
    InputSource,
    MessageSource,
    defaults_of,
    request_whole_answer,
    set_idempotency_key,
)
from jobs.store import RETRY_AFTER_S
from sluice.client.channel import LOOKUP_S, error_of
from sluice.defaults import AUTO
from sluice.errors import InvalidRequest, SluiceError, TransportUnavailable, UnknownModel
from sluice.internal.v1.items_pb2 import FindTokenEndsRequest
from sluice.internal.v1.job_pb2 import ItemOutcome, JobRecord
from sluice.openai.fields import BadField
from sluice.v1.inference_pb2 import CountTokensRequest, EmbedRequest, GenerateRequest
from sluice.v1.jobs_pb2 import JobItemError, JobResult, JobSpec, JobStage
from sluice.wire.patience import patiently

COLUMNS: Final = frozenset({"text", "part", "parts"})
"""Columns that a template of a stage may use."""
TEXT_ONLY: Final = "{text}"
"""Template of a stage that has none."""
BETWEEN: Final = "\n\n"
"""Separator between answers that are joined."""
ANSWER_SHARE: Final = 4
"""Part of the context that is left for an answer without max_tokens: one in this many."""
GATEWAY_S: Final = 60.0
"""How long a gateway is waited for, in seconds."""


def check_stages(spec: JobSpec) -> None:
    """Raise InvalidRequest if the stages of a job do not fit together."""
    if len(spec.stages) == 1:
        raise InvalidRequest.of(
            "spec.stages", "has one stage; name two or more: one for the parts, one for answers"
        )
    for number, stage in enumerate(spec.stages):
        field = f"spec.stages[{number}]"
        columns = Template(stage.template or TEXT_ONLY).columns
        if "text" not in columns or not columns <= COLUMNS:
            raise InvalidRequest.of(
                f"{field}.template", "needs {text}, and may have {part} and {parts}"
            )
        if stage.overlap_tokens and stage.overlap_tokens >= stage.split_tokens:
            raise InvalidRequest.of(f"{field}.overlap_tokens", "must be less than split_tokens")


def stage_of(spec: JobSpec, number: int) -> JobStage:
    """Return the specification of a stage; the last one also for its repetitions."""
    return spec.stages[min(number, len(spec.stages) - 1)]


def _rendered(stage: JobStage, text: str, part: int, parts: int) -> str:
    """Return the prompt of a part, counted from 0."""
    values = {"text": text, "part": part + 1, "parts": parts}
    return Template(stage.template or TEXT_ONLY).render(values)


Source = InputSource | MessageSource
"""Reader of the input itself."""


async def open_stage(
    process: JobProcess,
    record: JobRecord,
    stage: int,
    metadata: tuple[tuple[str, str], ...],
    skipped: int = 0,
) -> tuple[Source | None, AsyncIterator[Block]]:
    """Return the items of a stage, and what reads the input for them; None if they come from a stage.

    Args:
        process: the process of the job.
        record: the job.
        stage: number of the stage.
        metadata: of calls to gateways, which split texts.
        skipped: items at the start to leave out, for a job without stages.
    """
    parts = StageSource(process, record, stage, metadata) if record.job.spec.stages else None
    if parts is not None and stage:
        return None, parts.blocks(parts.answers())
    source: Source
    if record.job.spec.input.nats_subject:
        source = MessageSource(process, record, skipped)
    else:
        upload = await process.store.upload(record.upload_id)
        source = InputSource(process, record, upload, skipped)
    blocks = source.blocks()
    return source, blocks if parts is None else parts.blocks(parts.documents(blocks))


@dataclass
class _Document:
    """A text that is split into the items of a stage.

    Attributes:
        result: has its name, line and URL.
        index: its index among the documents.
        request: what is asked of each part.
        text: the text.
        parts_before: how many items it had, if there have to be fewer now.
    """

    result: JobResult
    index: int
    request: GenerateRequest
    text: str
    parts_before: int = 0


class StageSource:
    """Items of one stage of a job, in blocks. Texts are split by the tokens that a gateway finds in them."""

    def __init__(
        self,
        process: JobProcess,
        record: JobRecord,
        stage: int,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self._store, self._gateways = process.store, process.gateways
        self._call_options: dict[str, Any] = {
            "metadata": (*metadata, *process.gateways.metadata),
            "timeout": LOOKUP_S,
        }
        self._job, self._spec, self._attempt = record.job, record.job.spec, record.attempt
        self._number = stage
        self._stage = stage_of(self._spec, stage)
        self._model = self._stage.model or self._spec.model or AUTO
        self._part_size = 0

    async def blocks(
        self, documents: AsyncIterator[_Document | ItemOutcome]
    ) -> AsyncIterator[Block]:
        """Yield the parts of documents, and outcomes, `BLOCK` at a time or fewer that have `BLOCK_BYTES`."""
        block, index, size = Block(), 0, 0
        async for document in documents:
            lines: Block = (
                [document] if isinstance(document, ItemOutcome) else await self._split(document)
            )
            for line in lines:
                line.position = index
                if isinstance(line, Item):
                    line.index = index
                    size += line.request.ByteSize()
                else:
                    line.result.index = index
                index += 1
                block.append(line)
                if len(block) == BLOCK or size >= BLOCK_BYTES:
                    yield block
                    block, size = [], 0
        if block:
            yield block

    async def documents(
        self, blocks: AsyncIterator[Block]
    ) -> AsyncIterator[_Document | ItemOutcome]:
        """Yield the documents of the first stage: the lines of the input."""
        async for block in blocks:
            for line in block:
                if isinstance(line, ItemOutcome):
                    yield _whole(line, line.result.index)
                    continue
                result = JobResult(line=line.line, custom_id=line.custom_id, url=line.url)
                if isinstance(line.request, EmbedRequest) or not line.request.HasField("prompt"):
                    reason = "prompt: missing; a job with stages splits prompts"
                    yield _dead(result, line.index, "BAD_LINE", reason)
                else:
                    yield _Document(result, line.index, line.request, line.request.prompt)

    async def answers(self) -> AsyncIterator[_Document | ItemOutcome]:
        """Yield the documents of a later stage: the answers of the stage before."""
        parts: list[ItemOutcome] = []
        async for outcome in merge_attempts(
            self._store, self._job.id, self._number - 1, self._attempt
        ):
            if parts and parts[0].document != outcome.document:
                yield self._joined(parts)
                parts = []
            parts.append(outcome)
        if parts:
            yield self._joined(parts)

    def _joined(self, parts: list[ItemOutcome]) -> _Document | ItemOutcome:
        """Return the document of the answers to all its parts; its outcome, if there is nothing left to do."""
        first, repeated = parts[0], self._number >= len(self._spec.stages)
        failed = next((part for part in parts if part.result.HasField("error")), None)
        if failed is not None:
            if len(parts) > 1:
                where = f"part {failed.result.part + 1} of {len(parts)}"
                failed.result.error.message = f"{where}: {failed.result.error.message}"
            return _whole(failed, first.document, carried=True)
        if repeated and len(parts) == 1:
            return _whole(first, first.document, carried=True)
        text = BETWEEN.join(part.result.answer.text for part in parts)
        before = len(parts) if repeated else 0
        return _Document(first.result, first.document, defaults_of(self._spec), text, before)

    async def _split(self, document: _Document) -> Block:
        """Return the items of a document."""
        result, index, before = document.result, document.index, document.parts_before
        try:
            texts = await self._parts(document.text)
            # A repetition that does not shrink the document would never end.
            if before and len(texts) >= before:
                reason = f"its {before} answers do not get shorter; ask for shorter ones, or for longer parts"
                return [_dead(result, index, "ANSWERS_TOO_LONG", reason)]
            return [self._item(document, part, len(texts), text) for part, text in enumerate(texts)]
        except (InvalidRequest, TransportUnavailable):
            raise
        except UnknownModel as error:
            raise model_removed(self._model) from error
        except SluiceError as error:
            return [_dead(result, index, error.reason, error.message, error.code.value[0])]
        except BadField as error:
            return [_dead(result, index, "BAD_LINE", str(error))]

    def _item(self, document: _Document, part: int, parts: int, text: str) -> Item:
        """Return the item of a part; its index is set later."""
        spec, stage, result = self._spec, self._stage, document.result
        request = GenerateRequest()
        request.CopyFrom(document.request)
        request.prompt = _rendered(stage, text, part, parts)
        request.model = stage.model or request.model
        if stage.HasField("sampling"):
            request.sampling.CopyFrom(stage.sampling)
        request_whole_answer(request, spec)
        hashed = b"" if spec.dedupe.disabled else input_hash(request)
        set_idempotency_key(request, self._job, f"{result.custom_id}\0{self._number}\0{part}")
        return Item(
            custom_id=result.custom_id,
            line=result.line,
            request=request,
            url=result.url,
            input_hash=hashed,
            document=document.index,
            part=part,
            parts=parts,
        )

    async def _parts(self, text: str) -> list[str]:
        """Return the parts of a text, at least one.

        Raises:
            InvalidRequest: template and answer leave no room in the model's context.
            SluiceError: the gateway refuses the text, or does not respond.
        """
        size = self._part_size = self._part_size or await self._part_tokens()
        request = FindTokenEndsRequest(model=self._model, text=text)
        ends = (await self._call_gateway(self._gateways.stub.FindTokenEnds, request)).ends
        overlap = min(self._stage.overlap_tokens, size - 1)
        return [text[begin:end] for begin, end in split(text, ends, size, overlap)] or [text]

    async def _part_tokens(self) -> int:
        prompt = _rendered(self._stage, "", 0, 1)
        request = CountTokensRequest(model=self._model, prompt=prompt if prompt.strip() else "-")
        counted = await self._call_gateway(self._gateways.models.CountTokens, request)
        context = int(counted.context_tokens)
        has_own = self._stage.HasField("sampling")
        max_tokens = (self._stage if has_own else self._spec).sampling.max_tokens
        free = context - counted.token_count - (max_tokens or context // ANSWER_SHARE)
        if free < 1:
            raise InvalidRequest.of(
                "spec.stages",
                f"template and max_tokens leave no tokens for a text in the context of {context} "
                f"tokens of {counted.model}; shorten the template, or lower max_tokens",
            )
        return int(min(self._stage.split_tokens or free, free))

    async def _call_gateway(self, method: Any, request: Any) -> Any:
        """Call a gateway; try again while none responds or has capacity, for `GATEWAY_S`."""

        async def call() -> Any:
            try:
                return await method(request, **self._call_options)
            except grpc.aio.AioRpcError as failed:
                error = error_of(failed)
            if failure_kind(error) is FailureKind.NO_ROOM:
                raise TransportUnavailable(error.message) from error
            raise error

        return await patiently(
            call, (TransportUnavailable,), bound_s=GATEWAY_S, wait_s=RETRY_AFTER_S
        )


def _dead(of: JobResult, document: int, reason: str, message: str, code: int = 3) -> ItemOutcome:
    error = JobItemError(code=code, reason=reason, message=message[:REASON_CHARS_MAX])
    result = JobResult(line=of.line, custom_id=of.custom_id, url=of.url, error=error)
    return _whole(ItemOutcome(result=result), document)


def _whole(outcome: ItemOutcome, document: int, *, carried: bool = False) -> ItemOutcome:
    """Return an outcome as that of a whole document."""
    outcome.result.part, outcome.result.parts = 0, 1
    outcome.document, outcome.carried = document, carried
    outcome.ClearField("input_hash")
    return outcome
