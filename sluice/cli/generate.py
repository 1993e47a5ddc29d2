"""`sluice generate`: one prompt, one answer, streamed."""

import sys
from typing import Annotated

import typer

from sluice.cli import options, output
from sluice.client import AnswerBuilder, Client, GenerateOptions


@options.sampling
def generate(
    *,
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT",
            help='The prompt; "-" reads it from stdin, less a final line break unless --raw is given.',
        ),
    ],
    chosen: GenerateOptions,
    logprobs: options.Logprobs = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt to the model without chat template.")
    ] = False,
    tenant: options.Tenant = None,
    address: options.Address = options.ADDRESS,
    as_json: options.Json = False,
) -> None:
    """Ask for one answer, and print it as it comes.

    With --json prints one object when the answer is complete: request_id, trace_id, model, tier, text, finish_reason,
    usage, timings and more. Ctrl-C cancels the request in the mesh.
    """
    if logprobs is not None and not as_json:
        raise typer.BadParameter(
            "the log-probabilities are part of --json", param_hint="--logprobs"
        )
    chosen["raw_prompt"] = raw
    if logprobs is not None:
        chosen["logprobs"] = logprobs
    if prompt == "-":
        read = options.text_of(sys.stdin.buffer.read(), "prompt")
        prompt = read if raw else read.removesuffix("\n")
    with Client(address, tenant=tenant) as client, client.generate(prompt, **chosen) as stream:
        if as_json:
            output.write_json(output.answer_object(stream.answer()))
        else:
            builder = AnswerBuilder()
            output.write_events(stream, builder)
            output.note(output.summary(builder.build()))
