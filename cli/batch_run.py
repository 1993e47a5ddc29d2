"""`sluice batch run`: the prompts of a file, asked now and answered together."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from cli import options, output
from cli.commands import argument, option, wants_json
from cli.failure import CommandFailed
from cli.files import PIECE_BYTES, check_input, opened, pieces
from sluice.client import AnswerBatch, GenerateOptions
from sluice.client.openai_lines import output_line, result_of
from sluice.client.request import generate_request
from sluice.v1 import inference_pb2
from sluice.v1 import jobs_pb2 as pb

if TYPE_CHECKING:
    from jobs.items import BadLine, Item

Out = Annotated[
    Path | None,
    Option(help="Write OpenAI's batch output here, in the order of the input.", metavar="FILE"),
]
InputTemplate = Annotated[
    str | None, Option(help='Makes prompts out of columns: "Summarize: {text}".', metavar="TEXT")
]
IdField = Annotated[
    str, Option(help='The column that names an item.  [default: "id"]', metavar="NAME")
]

_INVALID_ARGUMENT = 3


def run(
    *,
    source: str = argument(..., "A file, or - for stdin.", metavar="FILE|-", show_default=False),
    chosen: options.BulkSampling,
    out: Out = None,
    format: Literal["auto", "jsonl", "csv", "parquet", "text"] = option(
        "auto", "How the input is written; text has a prompt a line."
    ),
    template: InputTemplate = None,
    id_field: IdField = "",
    priority: options.Priority = "standard",
    concurrency: int = option(64, "Prompts at once.", min=1, max=1024),
    client: options.TenantClient,
) -> None:
    """Ask all prompts of a file now, and print the answers together, with throughput and tokens.

    For what fits into memory and need not survive this command; else `sluice batch submit`. Prints OpenAI's batch
    output, a line each, with --json one object. Exit code 0 when every prompt was answered.
    """
    from jobs.items import Item

    chosen["priority"] = priority
    found = list(_read_here(source, format, template, id_field, chosen))
    items = [one.request for one in found if isinstance(one, Item)]
    requests = [one for one in items if isinstance(one, inference_pb2.GenerateRequest)]
    if len(requests) < len(items):
        message = "embeddings are for `sluice embed`, or `sluice batch submit`"
        raise CommandFailed("INPUT_INVALID", message)
    timeout_s = chosen.get("timeout_s")
    more: GenerateOptions = {} if timeout_s is None else {"timeout_s": timeout_s}
    with opened(out) as file:
        answered = client.generate_batch(requests, concurrency=concurrency, **more)
        outcomes = iter(answered.outcomes)
        results = [
            result_of(index, one.line, one.custom_id, one.url, next(outcomes))
            if isinstance(one, Item)
            else _bad(index, one)
            for index, one in enumerate(found)
        ]
        lines = [output_line("run", result) for result in results]
        if file is not None:
            for line in lines:
                file.write(line)
            file.complete()
    summary = _summary(answered, len(found))
    if file is None and not wants_json():
        for line in lines:
            output.write_json(line)
    failed = [one.error for one in results if one.HasField("error")]
    if not failed and not wants_json():
        print(_sentence(summary), file=sys.stderr, flush=True)
    described = {**summary, **({"results": lines} if file is None else {"out": str(out)})}
    unanswered = None
    if failed:
        message = f"{len(failed)} of {len(found)} got no answer: {failed[0].message}"
        unanswered = (failed[0].reason, message)
    output.show(described, failed=unanswered)


def _summary(answered: AnswerBatch, count: int) -> dict[str, Any]:
    return {
        "items": count,
        "answered": len(answered.answers),
        "failed": count - len(answered.answers),
        "prompt_tokens": answered.prompt_tokens,
        "completion_tokens": answered.completion_tokens,
        "wall_s": round(answered.wall_s, 3),
        "items_per_s": round(answered.items_per_s, 2),
        "tokens_per_s": round(answered.tokens_per_s, 1),
    }


def _sentence(summary: dict[str, Any]) -> str:
    return (
        f"{summary['answered']} answers · {summary['prompt_tokens']} prompt tokens"
        f" · {summary['completion_tokens']} tokens · {summary['wall_s']:.1f} s"
        f" · {summary['items_per_s']:.1f} items/s · {summary['tokens_per_s']:.0f} tokens/s"
    )


def _read_here(
    source: str, format: str, template: str | None, id_field: str, chosen: GenerateOptions
) -> "Iterator[Item | BadLine]":
    from jobs.input import Format, Template, read_items

    named = Format(format)
    if source == "-":
        chunks: Iterator[bytes] = iter(lambda: sys.stdin.buffer.read(PIECE_BYTES), b"")
    else:
        path = Path(source)
        check_input(path)
        chunks = pieces(path)
        named = Format.of_name(path.name) if named is Format.AUTO else named
    defaults = generate_request("-", chosen)
    defaults.ClearField("input")
    defaults.ClearField("idempotency_key")
    made = None if template is None else Template(template)
    return read_items(chunks, named, made, defaults, id_field=id_field)


def _bad(index: int, line: "BadLine") -> pb.JobResult:
    error = pb.JobItemError(code=_INVALID_ARGUMENT, reason=line.code, message=line.reason)
    return pb.JobResult(index=index, line=line.line, custom_id=line.custom_id or "", error=error)
