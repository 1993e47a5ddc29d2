"""`sluice transcribe`: the text of a sound file, streamed."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cli import options, output
from sluice.client import Audio, GenerateOptions
from sluice.client.request import AudioTaskName
from sluice.errors import InputInvalid


def transcribe(
    *,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help='A WAV file: 16 kHz, one channel, 16 bits; "-" reads stdin.'
        ),
    ],
    language: Annotated[
        str,
        typer.Option(
            "--language", "-l",
            metavar="CODE",
            help='That is spoken, such as "en".  [default: the model finds it]',
        ),
    ] = "",
    prompt: Annotated[
        str,
        typer.Option(metavar="TEXT", help="What comes before, with the names and spelling wanted."),
    ] = "",
    translate: Annotated[
        bool, typer.Option("--translate", help="Translate into English.")
    ] = False,
    model: options.Model = options.MODEL,
    priority: options.Priority = "interactive",
    temperature: options.Temperature = None,
    client: options.TenantClient,
) -> None:  # fmt: skip
    """Write down the speech in a file, and print it as it comes.

    With --json prints one object when the text is complete, as `sluice generate` does. Ctrl-C cancels the request in
    the mesh.
    """
    task: AudioTaskName = "translate" if translate else "transcribe"
    audio = Audio(_read(file), language=language, prompt=prompt, task=task)
    chosen = GenerateOptions(model=model, priority=priority)
    if temperature is not None:
        chosen["temperature"] = temperature
    with client.generate(audio, **chosen) as stream:
        output.write_answer(stream)


def _read(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InputInvalid(f"{file}: {error.strerror}") from error
