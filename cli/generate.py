"""`sluice generate`: one prompt, one answer, streamed."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from cli import options, output
from sluice.client import Answer


def generate(
    *,
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT",
            help='The prompt; "-" reads it from stdin, less a final line break unless --raw is given.',
        ),
    ],
    chosen: options.Sampling,
    logprobs: options.Logprobs = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt to the model without chat template.")
    ] = False,
    n: options.Count = 1,
    tool: options.ToolFiles = None,
    tool_choice: options.ToolChoice = None,
    client: options.TenantClient,
    as_json: options.Json = False,
) -> None:
    """Ask for one answer, and print it as it comes.

    With --json prints one object when the answer is complete: request_id, trace_id, model, tier, text, finish_reason,
    usage, timings and more; of several answers (--n) one a line. Calls of tools are printed as JSON, one a line, behind
    the text. Ctrl-C cancels the request in the mesh.
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
    if tools := options.tools_of(tool):
        chosen["tools"] = tools
    if tool_choice is not None:
        chosen["tool_choice"] = tool_choice
    if n > 1:
        _print_several(client.generate_several(prompt, n, **chosen), as_json)
    else:
        with client.generate(prompt, **chosen) as stream:
            output.write_answer(stream, as_json)


def _print_several(answers: Sequence[Answer], as_json: bool) -> None:
    for number, answer in enumerate(answers, start=1):
        if as_json:
            output.write_json(output.answer_object(answer))
            continue
        output.write_text(f"[{number}] {answer.text}\n")
        output.write_calls(answer)
        output.note(output.summary(answer))
