"""Jobs with stages: long texts in parts, and the answers of a stage as the texts of the next one.

An item of the first stage is a part of a document; an item of a later one has the answers of a
document, or a part of them if they are too long. The last stage is repeated until each document has
one answer. If a part is a dead letter, so is its document.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from jobs.answers import input_hash
from jobs.core.retry import FailureKind, ItemRetryPolicy, failure_kind
from jobs.core.split import split
from jobs.core.window import BLOCK, BLOCK_BYTES
from jobs.input import Template
from jobs.items import Item
from jobs.process import JobProcess, model_removed
from jobs.results import merge_attempts, stage_of
from jobs.sources import (
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
from sluice.v1.jobs_pb2 import JobSpec, JobStage
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
    """Return what reads the input of a stage, None if its texts come from the stage before; and its items in blocks.

    Args:
        process: the process of the job.
        record: the job.
        stage: number of the stage.
        metadata: of calls to gateways, which find the tokens by which texts are split.
        skipped: items at the start to leave out, for a job without stages.

    Raises:
        UploadUnknown: the upload was deleted.
        TransportUnavailable: JetStream does not respond.
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
    if parts is None:
        return source, blocks
    return source, parts.blocks(item async for block in blocks for item in block)


@dataclass
class StageSource:
    """Items of one stage of a job, in blocks. Texts are split by the tokens that a gateway finds in them."""

    process: JobProcess
    record: JobRecord
    number: int
    metadata: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        self._spec = self.record.job.spec
        self._stage = stage_of(self._spec, self.number)
        self._model = self._stage.model or self._spec.model or AUTO
        self._part_size = 0

    async def blocks(self, documents: AsyncIterator[Item]) -> AsyncIterator[Block]:
        """Yield the parts of documents, `BLOCK` at a time or fewer that have `BLOCK_BYTES`.

        Raises:
            InvalidRequest: see `_parts`.
            JobStopped: the model was removed.
            TransportUnavailable: JetStream or no gateway responds.
        """
        block, index, size = Block(), 0, 0
        async for document in documents:
            for item in await self._split(document):
                item.position = item.index = index
                size += item.request.ByteSize()
                index += 1
                block.append(item)
                if len(block) == BLOCK or size >= BLOCK_BYTES:
                    yield block
                    block, size = [], 0
        if block:
            yield block

    async def answers(self) -> AsyncIterator[Item]:
        """Yield the documents of a later stage: the answers of the stage before."""
        parts: list[ItemOutcome] = []
        async for outcome in merge_attempts(
            self.process.store, self.record.job.id, self.number - 1, self.record.attempt
        ):
            if parts and parts[0].document != outcome.document:
                yield self._joined(parts)
                parts = []
            parts.append(outcome)
        if parts:
            yield self._joined(parts)

    def _joined(self, parts: list[ItemOutcome]) -> Item:
        """Return the document of the answers to all its parts; with its outcome, if there is nothing left to do.

        `Item.parts` of a document that is repeated is how many it had: there have to be fewer now.
        """
        first, repeated = parts[0].result, self.number >= len(self._spec.stages)
        request = defaults_of(self._spec)
        document = Item(first.custom_id, first.line, request, first.url, parts[0].document)
        failed = next((part.result for part in parts if part.result.HasField("error")), None)
        if failed is not None:
            if len(parts) > 1:
                where = f"part {failed.part + 1} of {len(parts)}"
                failed.error.message = f"{where}: {failed.error.message}"
            document.outcome = failed
        elif repeated and len(parts) == 1:
            document.outcome = first
        else:
            request.prompt = BETWEEN.join(part.result.answer.text for part in parts)
            document.parts = len(parts) if repeated else 0
        document.carried = document.outcome is not None
        return document

    async def _split(self, document: Item) -> Block:
        """Return the items of a document; the document itself if it has its outcome."""
        request, before = document.request, document.parts
        if document.outcome is None:
            try:
                if isinstance(request, EmbedRequest) or not request.HasField("prompt"):
                    raise BadField("prompt: missing; a job with stages splits prompts")
                texts = await self._parts(request.prompt)
                if not before or len(texts) < before:
                    parts = range(len(texts))
                    return [self._item(document, request, part, texts) for part in parts]
                # A repetition that does not shrink the document would never end.
                reason = f"its {before} answers do not get shorter; ask for shorter ones, or for longer parts"
                document.fail("ANSWERS_TOO_LONG", reason)
            except (InvalidRequest, TransportUnavailable):
                raise
            except UnknownModel as error:
                raise model_removed(self._model) from error
            except SluiceError as error:
                document.fail(error.reason, error.message, error.code.value[0])
            except BadField as error:
                document.fail("BAD_LINE", str(error))
        document.document, document.part, document.parts = document.index, 0, 1
        return [document]

    def _item(
        self, document: Item, original: GenerateRequest, part: int, texts: Sequence[str]
    ) -> Item:
        """Return the item of a part; its index is set later."""
        spec, stage, request = self._spec, self._stage, GenerateRequest()
        request.CopyFrom(original)
        request.ClearField("idempotency_key")
        request.prompt = _rendered(stage, texts[part], part, len(texts))
        request.model = stage.model or request.model
        if stage.HasField("sampling"):
            request.sampling.CopyFrom(stage.sampling)
        request_whole_answer(request, spec)
        hashed = b"" if spec.dedupe.disabled else input_hash(request)
        set_idempotency_key(
            request, self.record.job, f"{document.custom_id}\0{self.number}\0{part}"
        )
        item = Item(document.custom_id, document.line, request, document.url, input_hash=hashed)
        item.document, item.part, item.parts = document.index, part, len(texts)
        return item

    async def _parts(self, text: str) -> list[str]:
        """Return the parts of a text, at least one.

        Raises:
            InvalidRequest: template and answer leave no room in the model's context.
            SluiceError: the gateway refuses the text, or does not respond.
        """
        size = self._part_size = self._part_size or await self._part_tokens()
        request = FindTokenEndsRequest(model=self._model, text=text)
        ends = (await self._call_gateway(self.process.gateways.stub.FindTokenEnds, request)).ends
        overlap = min(self._stage.overlap_tokens, size - 1)
        return [text[begin:end] for begin, end in split(text, ends, size, overlap)] or [text]

    async def _part_tokens(self) -> int:
        prompt = _rendered(self._stage, "", 0, 1)
        request = CountTokensRequest(model=self._model, prompt=prompt if prompt.strip() else "-")
        counted = await self._call_gateway(self.process.gateways.models.CountTokens, request)
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
        """Call a gateway; try again for `GATEWAY_S` while none has capacity, and a few times after transient errors.

        Raises:
            TransportUnavailable: No gateway can be reached or has capacity.
            SluiceError: Another error, a timeout too, came too often, or no try can succeed.
        """
        metadata = (*self.metadata, *self.process.gateways.metadata)
        retries = ItemRetryPolicy.retries

        async def call_once() -> Any:
            nonlocal retries
            try:
                return await method(request, metadata=metadata, timeout=LOOKUP_S)
            except grpc.aio.AioRpcError as rpc_error:
                error = error_of(rpc_error)
            kind = failure_kind(error)
            retries -= kind is FailureKind.TRANSIENT
            if kind is FailureKind.PERMANENT or retries < 0:
                raise error
            raise TransportUnavailable(error.message) from error

        return await patiently(
            call_once, (TransportUnavailable,), bound_s=GATEWAY_S, wait_s=RETRY_AFTER_S
        )
