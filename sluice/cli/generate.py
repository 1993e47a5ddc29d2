"""`sluice generate`: one prompt, one answer, streamed."""

import sys
from typing import Annotated

import typer

from sluice.cli import options, output
from sluice.client.answer import AnswerBuilder
from sluice.client.blocking import Client
from sluice.errors import InvalidRequest


def generate(
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT",
            help='The prompt; "-" reads it from stdin, less a final line break unless --raw is given.',
        ),
    ],
    model: options.Model = options.MODEL,
    priority: options.Priority = "interactive",
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    min_tokens: options.MinTokens = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    logprobs: options.Logprobs = None,
    label: options.Label = None,
    timeout: options.Timeout = None,
    tenant: options.Tenant = None,
    allow_degraded: options.AllowDegraded = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt to the model without chat template.")
    ] = False,
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
    chosen = options.given(
        model=model,
        priority=priority,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop or None,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        min_tokens=min_tokens,
        json_schema=options.schema_of(json_schema),
        regex=regex,
        logprobs=logprobs,
        labels=options.labels_of(label),
        timeout_s=timeout,
        allow_degraded=allow_degraded,
        raw_prompt=raw,
    )
    text = _read_prompt(raw) if prompt == "-" else prompt
    with Client(address, tenant=tenant) as client, client.generate(text, **chosen) as stream:
        if as_json:
            output.write_json(output.answer_object(stream.answer()))
        else:
            builder = AnswerBuilder()
            output.write_events(stream, builder)
            output.note(output.summary(builder.build()))


def _read_prompt(raw: bool) -> str:
    given = sys.stdin.buffer.read()
    try:
        text = given.decode()
    except UnicodeDecodeError as error:
        byte, where = given[error.start], error.start
        raise InvalidRequest.of(
            "prompt", f"is not valid UTF-8: byte 0x{byte:02x} at offset {where}"
        ) from error
    return text if raw else text.removesuffix("\n")
