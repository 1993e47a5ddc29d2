"""`sluice chat`: a conversation over several turns."""

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from cli import failure, options, output
from sluice.client import AnswerBuilder, Client, GenerateOptions, Message
from sluice.errors import InvalidRequest, SluiceError


def chat(
    *,
    system: Annotated[
        str | None, typer.Option(help="Instructions for the model before the first turn.")
    ] = None,
    chosen: options.Sampling,
    client: options.TenantClient,
) -> None:
    """Talk over several turns; each line is a turn.

    Ctrl-C cancels the running answer, Ctrl-D leaves. Lines can come from a pipe as well: then the first error ends the
    command. With --json prints one object per turn, as `sluice generate --json` does.
    """
    conversation = Conversation(client, chosen, system)
    if sys.stdin.isatty():
        _talk(conversation)
    else:
        for line in _piped_lines():
            conversation.say(line)


class Conversation:
    """The turns so far. A turn without an answer is dropped; the part of a cancelled answer that was printed stays."""

    def __init__(self, client: Client, chosen: GenerateOptions, system: str | None) -> None:
        self._client = client
        self._options = chosen
        self._turns = [Message("system", system)] if system is not None else []

    def say(self, text: str) -> None:
        """Sends one turn and prints the answer as it comes.

        Raises:
            SluiceError: there is no answer.
            KeyboardInterrupt: the answer was cancelled.
        """
        asked = [*self._turns, Message("user", text)]
        builder = AnswerBuilder()
        try:
            with self._client.generate(asked, **self._options) as stream:
                output.write_answer(stream, builder)
        finally:
            if builder.text:
                self._turns = [*asked, Message("assistant", builder.text)]


def _talk(conversation: Conversation) -> None:
    """Turns from a terminal: an error or Ctrl-C ends a turn, not the conversation."""
    import readline  # noqa: F401  line editing and history for input()

    while True:
        try:
            line = input("> ")
            if line.strip():
                conversation.say(line)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except SluiceError as error:
            failure.report(error, as_json=False)


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InvalidRequest.of("prompt", f"line {number} is not valid UTF-8") from error
        if text.strip():
            yield text
