"""Options that the commands of `sluice batch` share, and those of `submit`: each group fills its part of the job."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import duration, timestamp, unix_ms
from sluice.wire.enums import value_of

Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write OpenAI's batch output here, in the order of the input."
    ),
]
InputTemplate = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help='Makes prompts out of columns: "Summarize: {text}".'),
]
IdField = Annotated[
    str, typer.Option(metavar="NAME", help='The column that names an item.  [default: "id"]')
]

_REMOTE: Final = "://"
_NATS: Final = "nats://"


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """How the input is written, and where the messages of a subject begin and end."""

    format: Annotated[
        Literal["auto", "openai", "jsonl", "csv", "parquet"],
        typer.Option(help="How the input is written."),
    ] = "auto"
    template: InputTemplate = None
    id_field: IdField = ""
    messages: Annotated[
        int,
        typer.Option(
            min=0, help="Of nats://SUBJECT: the input ends after so many.  [default: no end]"
        ),
    ] = 0
    idle: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Of nats://SUBJECT: the input ends when none came for so long.  [default: no end]",
        ),
    ] = 0.0
    from_sequence: Annotated[
        int,
        typer.Option(
            min=0,
            help="Of nats://SUBJECT: of the first message in its stream.  [default: the first]",
        ),
    ] = 0

    def fill(self, where: pb.JobInput, source: str) -> Path | None:
        """Says in ``where`` what the input is; returns the path of a file that is to be uploaded."""
        word = "unspecified" if self.format == "auto" else self.format
        where.format = value_of(pb.JobInputFormat, word)
        where.template, where.id_field = self.template or "", self.id_field
        if source.startswith(_NATS):
            where.nats_subject = source.removeprefix(_NATS)
        elif self.messages or self.idle or self.from_sequence:
            message = "--messages, --idle and --from-sequence are for nats://SUBJECT"
            raise typer.BadParameter(message, param_hint="IN")
        elif _REMOTE in source:
            where.url = source
        else:
            return Path(source)
        where.nats_message_count, where.nats_start_sequence = self.messages, self.from_sequence
        if self.idle:
            where.nats_idle.CopyFrom(duration(self.idle * 1e3))
        return None


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """How long documents are split, and the answers to their parts put together."""

    split: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="Long documents: parts of at most so many tokens.  [default: what fits]",
        ),
    ] = 0
    overlap: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="Of the end of a part that begin the next one; needs --split.",
        ),
    ] = 0
    map: Annotated[
        str, typer.Option(metavar="TEXT", help='The prompt of a part: "Summarize: {text}".')
    ] = ""
    reduce: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help='Split documents; the prompt of the answers to the parts: "Put together: {text}".',
        ),
    ] = ""

    def stages(self) -> list[pb.JobStage]:
        """Of a job that splits documents; else none."""
        if not self.reduce:
            if self.split or self.overlap or self.map:
                message = "says how the answers to the parts are put together: it is needed"
                raise typer.BadParameter(message, param_hint="--reduce")
            return []
        first = pb.JobStage(
            name="map",
            template=self.map,
            split_tokens=self.split,
            overlap_tokens=self.overlap,
        )
        return [first, pb.JobStage(name="reduce", template=self.reduce)]


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """When a job ends, is paused or gives an item up, and how fast it runs."""

    deadline: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="The job expires after this time.")
    ] = None
    max_cost: Annotated[float, typer.Option(min=0, help="The job is paused at this cost.")] = 0.0
    requests_per_minute: Annotated[int, typer.Option(min=0)] = 0
    tokens_per_minute: Annotated[int, typer.Option(min=0)] = 0
    concurrency: Annotated[int, typer.Option(min=0, help="Items in flight at once.")] = 0
    max_bad_lines: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="The job is paused above this share of bad lines.  [default: 0.1]"
        ),
    ] = None
    max_retries: Annotated[int | None, typer.Option(min=0, help="Of an item.  [default: 3]")] = None

    def limits(self, item_timeout_s: float | None) -> pb.JobLimits:
        """Those that were given; the others keep their defaults."""
        end_ms = None if self.deadline is None else unix_ms() + round(self.deadline * 1e3)
        return pb.JobLimits(
            item_timeout=None if item_timeout_s is None else duration(item_timeout_s * 1e3),
            deadline_time=None if end_ms is None else timestamp(end_ms),
            max_cost=self.max_cost,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            concurrency=self.concurrency,
            max_bad_line_share=self.max_bad_lines,
        )

    def retries(self) -> pb.JobRetries | None:
        """None: as many as by default."""
        return None if self.max_retries is None else pb.JobRetries(max_retries=self.max_retries)
