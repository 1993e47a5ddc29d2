"""`sluice generate`: one prompt, one answer, streamed."""

import sys
from typing import Annotated

import typer

from cli import options, output
from cli.commands import wants_json


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
    logprobs: Annotated[
        int | None,
        typer.Option(help="Alternatives per token with their log-probabilities; needs --json."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt to the model without chat template.")
    ] = False,
    n: Annotated[
        int,
        typer.Option(
            "--n", min=1, max=16, help="So many answers; they differ above --temperature 0."
        ),
    ] = 1,
    tool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|TEXT",
            help="A function that the model may call, as JSON: name, description, parameters; or a list of them, or "
            "OpenAI's form. May be repeated.",
        ),
    ] = None,
    tool_choice: Annotated[
        str | None,
        typer.Option(metavar="none|auto|required|NAME", help="Whether, or which, tool is called."),
    ] = None,
    client: options.TenantClient,
) -> None:
    """Ask for one answer, and print it as it comes.

    With --json prints one object when the answer is complete: request_id, trace_id, model, tier, text, finish_reason,
    usage, timings and more; of several answers (--n) one a line. Calls of tools are printed as JSON, one a line, behind
    the text. Ctrl-C cancels the request in the mesh.
    """
    if logprobs is not None and not wants_json():
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
        answers = client.generate_several(prompt, n, **chosen)
        for number, answer in enumerate(answers, start=1):
            output.show_answer(answer, f"[{number}] {answer.text}\n")
        return
    with client.generate(prompt, **chosen) as stream:
        output.write_answer(stream)
