"""Jobs with stages: long texts in parts, and the answers of a stage as the texts of the next one.

An item of the first stage is a part of a document; an item of a later one has the answers of a document, or a part of
them where they are longer than there is room for. The last stage is repeated until each document has one answer. Where
a part is a dead letter, so is its document.
"""

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from jobs.answers import input_hash
from jobs.core.retry import Failure, failure_of
from jobs.core.split import split
from jobs.core.window import BLOCK, BLOCK_BYTES, Entry
from jobs.input import Template
from jobs.messages import MessageSource
from jobs.process import JobProcess, model_removed
from jobs.results import merged
from jobs.sources import (
    REASON_CHARS_MAX,
    Block,
    InputSource,
    ask_whole,
    defaults_of,
    name_request,
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
"""What a template of a stage may name."""
TEXT_ONLY: Final = "{text}"
BETWEEN: Final = "\n\n"
"""Stands between two answers that are put together."""
ANSWER_SHARE: Final = 4
"""A part of the context that is left to an answer without max_tokens: one in so many."""
GATEWAY_S: Final = 60.0
"""How long a gateway is waited for, seconds."""


def check_stages(spec: JobSpec) -> None:
    """Raises InvalidRequest when stages do not fit together."""
    if len(spec.stages) == 1:
        raise InvalidRequest.of(
            "spec.stages", "name two or more: one for the parts, one for answers"
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
    """The specification of a stage; the last one's of its repetitions."""
    return spec.stages[min(number, len(spec.stages) - 1)]


def _rendered(stage: JobStage, text: str, part: int, parts: int) -> str:
    """The prompt of a part, from 0."""
    values = {"text": text, "part": part + 1, "parts": parts}
    return Template(stage.template or TEXT_ONLY).render(values)


Source = InputSource | MessageSource
"""What reads the input itself."""


async def open_stage(
    process: JobProcess,
    record: JobRecord,
    stage: int,
    metadata: tuple[tuple[str, str], ...],
    skipped: int = 0,
) -> tuple[Source | None, AsyncIterator[Block]]:
    """Open the items of a stage, and what reads the input for them; None where that are the answers of a stage.

    Args:
        metadata: of calls to gateways, which split texts.
        skipped: items at the begin that are left out, of a job without stages.
    """
    parts = StageSource(process, record, stage, metadata) if record.job.spec.stages else None
    if parts is not None and stage:
        return None, parts.later()
    source: Source
    if record.job.spec.input.nats_subject:
        source = MessageSource(process, record, skipped)
    else:
        upload = await process.store.upload(record.upload_id)
        source = InputSource(process, record, upload, skipped)
    return source, source.blocks() if parts is None else parts.first(source.blocks())


class StageSource:
    """The items of one stage of a job, in blocks. Texts are split by the tokens that a gateway finds in them."""

    def __init__(
        self,
        process: JobProcess,
        record: JobRecord,
        stage: int,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self._store, self._gateways = process.store, process.gateways
        self._call: dict[str, Any] = {
            "metadata": (*metadata, *process.gateways.metadata),
            "timeout": LOOKUP_S,
        }
        self._job, self._spec, self._round = record.job, record.job.spec, record.round
        self._number = stage
        self._stage = stage_of(self._spec, stage)
        self._model = self._stage.model or self._spec.model or AUTO
        self._index = 0
        self._size = 0

    async def first(self, documents: AsyncIterator[Block]) -> AsyncIterator[Block]:
        """The entries of the first stage: parts of ``documents``."""
        parts = (await self._of_line(one) async for block in documents for one in block)
        async for block in _blocks(parts):
            yield block

    async def later(self) -> AsyncIterator[Block]:
        """The entries of a later stage, out of the outcomes of the stage before."""
        parts = (await self._of_document(one) async for one in self._documents())
        async for block in _blocks(parts):
            yield block

    async def _of_line(self, one: Entry | ItemOutcome) -> Block:
        if isinstance(one, ItemOutcome):
            return [self._placed(one, one.result.index, carried=False)]
        result = JobResult(line=one.line, custom_id=one.custom_id, url=one.url)
        if isinstance(one.request, EmbedRequest) or not one.request.HasField("prompt"):
            reason = "a job with stages splits prompts: the line has none"
            return [self._dead(result, one.index, "BAD_LINE", reason)]
        return await self._split(result, one.index, one.request, one.request.prompt, 0)

    async def _documents(self) -> AsyncIterator[list[ItemOutcome]]:
        """The outcomes of each document in the stage before."""
        held: list[ItemOutcome] = []
        async for outcome in merged(self._store, self._job.id, self._number - 1, self._round):
            if held and held[0].document != outcome.document:
                yield held
                held = []
            held.append(outcome)
        if held:
            yield held

    async def _of_document(self, document: list[ItemOutcome]) -> Block:
        first = document[0]
        failed = next((one for one in document if one.result.HasField("error")), None)
        if failed is not None:
            if len(document) > 1:
                where = f"part {failed.result.part + 1} of {len(document)}"
                failed.result.error.message = f"{where}: {failed.result.error.message}"
            return [self._placed(failed, first.document, carried=True)]
        repeated = self._number >= len(self._spec.stages)
        if repeated and len(document) == 1:
            return [self._placed(first, first.document, carried=True)]
        text = BETWEEN.join(one.result.answer.text for one in document)
        base, result = defaults_of(self._spec), first.result
        return await self._split(
            result, first.document, base, text, len(document) if repeated else 0
        )

    async def _split(
        self, of: JobResult, document: int, base: GenerateRequest, text: str, before: int
    ) -> Block:
        """The items of a text; ``before``: how many it had, when there have to be fewer now."""
        try:
            texts = await self._parts(text)
        except (InvalidRequest, TransportUnavailable):
            raise
        except UnknownModel as error:
            raise model_removed(self._model) from error
        except SluiceError as error:
            return [self._dead(of, document, error.reason, error.message, error.code.value[0])]
        if before and len(texts) >= before:
            reason = f"its {before} answers do not get shorter: ask for shorter ones, or for longer parts"
            return [self._dead(of, document, "ANSWERS_TOO_LONG", reason)]
        try:
            return [
                self._entry(of, document, base, part, len(texts), one)
                for part, one in enumerate(texts)
            ]
        except BadField as error:
            return [self._dead(of, document, "BAD_LINE", str(error))]

    def _entry(
        self, of: JobResult, document: int, base: GenerateRequest, part: int, parts: int, text: str
    ) -> Entry:
        spec, stage = self._spec, self._stage
        request = GenerateRequest()
        request.CopyFrom(base)
        request.prompt = _rendered(self._stage, text, part, parts)
        request.model = stage.model or request.model
        if stage.HasField("sampling"):
            request.sampling.CopyFrom(stage.sampling)
        ask_whole(request, spec)
        hashed = b"" if spec.dedupe.disabled else input_hash(request)
        name_request(request, self._job, f"{of.custom_id}\0{self._number}\0{part}")
        index = self._next_index()
        return Entry(
            index, index, of.line, of.custom_id, of.url, request, hashed, document, part, parts
        )

    def _dead(
        self, of: JobResult, document: int, reason: str, message: str, code: int = 3
    ) -> ItemOutcome:
        result = JobResult(line=of.line, custom_id=of.custom_id, url=of.url)
        result.error.CopyFrom(
            JobItemError(code=code, reason=reason, message=message[:REASON_CHARS_MAX])
        )
        return self._placed(ItemOutcome(result=result), document, carried=False)

    def _placed(self, outcome: ItemOutcome, document: int, *, carried: bool) -> ItemOutcome:
        """``outcome`` as that of the next item."""
        outcome.place = outcome.result.index = self._next_index()
        outcome.result.part, outcome.result.parts = 0, 1
        outcome.document, outcome.carried = document, carried
        outcome.ClearField("input_hash")
        return outcome

    async def _parts(self, text: str) -> list[str]:
        """The parts of ``text``, at least one.

        Raises:
            InvalidRequest: template and answer leave no room in the model's context.
            SluiceError: the gateway does not take the text, or does not answer.
        """
        size = self._size = self._size or await self._part_tokens()
        request = FindTokenEndsRequest(model=self._model, text=text)
        found = await self._ask(self._gateways.stub.FindTokenEnds, request)
        overlap = min(self._stage.overlap_tokens, size - 1)
        return [text[begin:end] for begin, end in split(text, found.ends, size, overlap)] or [text]

    async def _part_tokens(self) -> int:
        prompt = _rendered(self._stage, "", 0, 1)
        request = CountTokensRequest(model=self._model, prompt=prompt if prompt.strip() else "-")
        counted = await self._ask(self._gateways.models.CountTokens, request)
        context = int(counted.context_tokens)
        own = self._stage.HasField("sampling")
        asked = (self._stage if own else self._spec).sampling.max_tokens
        room = context - counted.token_count - (asked or context // ANSWER_SHARE)
        if room < 1:
            raise InvalidRequest.of(
                "spec.stages",
                f"template and max_tokens leave no room for a text in the {context} tokens of {counted.model}",
            )
        return int(min(self._stage.split_tokens or room, room))

    async def _ask(self, method: Any, request: Any) -> Any:
        """Asks again while no gateway answers, or while it has no room."""

        async def ask() -> Any:
            try:
                return await method(request, **self._call)
            except grpc.aio.AioRpcError as failed:
                error = error_of(failed)
            if failure_of(error) is Failure.NO_ROOM:
                raise TransportUnavailable(error.message) from error
            raise error

        return await patiently(
            ask, (TransportUnavailable,), bound_s=GATEWAY_S, wait_s=RETRY_AFTER_S
        )

    def _next_index(self) -> int:
        self._index += 1
        return self._index - 1


async def _blocks(parts: AsyncIterator[Block]) -> AsyncIterator[Block]:
    """Gives the entries `BLOCK` at a time, or fewer that have `BLOCK_BYTES`."""
    made: Block = []
    size = 0
    async for some in parts:
        for one in some:
            made.append(one)
            size += one.request.ByteSize() if isinstance(one, Entry) else 0
            if len(made) == BLOCK or size >= BLOCK_BYTES:
                yield made
                made, size = [], 0
    if made:
        yield made
