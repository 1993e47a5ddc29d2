"""`sluice chat`: a conversation, on a terminal or from a pipe."""

import sys
from collections.abc import Iterator
from typing import Final

from typer import Option

from cli import failure, options, output
from cli.target import last_target
from sluice.client import AnswerBuilder, Client, GenerateOptions, Message
from sluice.defaults import AUTO
from sluice.errors import InvalidRequest, SluiceError

HELP: Final = """\
/model         show the model, and which others there are
/model NAME    ask this model from now on
/clear         forget the turns so far
/exit          leave; so do Ctrl-D, and Ctrl-C twice
//text         a turn that begins with a slash
Ctrl-C         cancel the answer that is being written"""
_LEAVE: Final = frozenset({"/exit", "/quit", "/bye", "exit", "quit"})


def chat(
    *,
    system: str | None = Option(None, help="Instructions for the model before the first turn."),
    chosen: options.Sampling,
    client: options.TenantClient,
) -> None:
    """Talk with a model over several turns; each line is a turn.

    On a terminal /help lists commands, /exit leaves, and Ctrl-C cancels the running answer. Lines can come from a pipe
    as well: then every line is a turn, and the first error ends the command. With --json prints one object per turn,
    as `sluice generate --json` does.
    """
    conversation = ChatSession(client, chosen, system)
    if sys.stdin.isatty():
        _talk(conversation)
    else:
        for line in _piped_lines():
            conversation.send_turn(line)


class ChatSession:
    """The turns so far. A turn without an answer is dropped; the part of a cancelled answer that was printed stays."""

    def __init__(self, client: Client, chosen: GenerateOptions, system: str | None) -> None:
        self._client = client
        self._options = chosen
        self._first = [Message("system", system)] if system is not None else []
        self._turns = list(self._first)

    @property
    def model(self) -> str:
        """The model that is asked."""
        return self._options.get("model", AUTO)

    def use(self, model: str) -> None:
        """Ask `model` from now on.

        Raises:
            InvalidRequest: there is no such model.
        """
        if model not in (names := self.models()):
            raise InvalidRequest.of("model", f"no model {model!r}; there are {', '.join(names)}")
        self._options["model"] = model

    def models(self) -> list[str]:
        """List the models that can be asked, `AUTO` first."""
        return [AUTO, *(model.name for model in self._client.list_models())]

    def clear(self) -> None:
        """Forget the turns, but for the instructions."""
        self._turns = list(self._first)

    def send_turn(self, text: str) -> None:
        """Send one turn and print the answer as it comes.

        Raises:
            SluiceError: there is no answer.
            KeyboardInterrupt: the answer was cancelled.
        """
        messages = [*self._turns, Message("user", text)]
        builder = AnswerBuilder()
        try:
            with self._client.generate(messages, **self._options) as stream:
                output.write_answer(stream, builder)
        finally:
            if builder.text:
                self._turns = [*messages, Message("assistant", builder.text)]


def _talk(conversation: ChatSession) -> None:
    """Take turns from a terminal: an error or Ctrl-C ends a turn, not the conversation."""
    import readline  # noqa: F401  line editing and history for input()

    target = last_target()
    where = f" at {target.address}" if target else ""
    output.note(f"model {conversation.model}{where}; /help lists commands, /exit or Ctrl-D leaves")
    while (line := _next_line()) is not None:
        try:
            _take(conversation, line.strip())
        except KeyboardInterrupt:
            print()
            output.note("cancelled")
        except SluiceError as error:
            failure.report(error, as_json=False)


def _next_line() -> str | None:
    """Return the next line that is typed; None to leave.

    Raises:
        KeyboardInterrupt: Ctrl-C came twice.
    """
    interrupted = False
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            if interrupted:
                raise
            interrupted = True
            output.note("to leave: /exit, Ctrl-D, or Ctrl-C again")
            continue
        return None if line.strip() in _LEAVE else line


def _take(conversation: ChatSession, line: str) -> None:
    """Run a command, or send a turn."""
    name, _, rest = line.partition(" ")
    match name, rest.strip():
        case "", _:
            return
        case "/model", "":
            _print_reply(
                f"model {conversation.model}; there are {', '.join(conversation.models())}"
            )
        case "/model", model:
            conversation.use(model)
            output.note(f"model {model}")
        case "/clear", _:
            conversation.clear()
            output.note("the turns so far are forgotten")
        case "/help", _:
            _print_reply(HELP)
        case _ if line.startswith("/") and not line.startswith("//"):
            _print_reply(f"no command {name}; /help lists them")
        case _:
            conversation.send_turn(line.removeprefix("/"))


def _print_reply(text: str) -> None:
    """Answer a command; stdout has the answers of models alone."""
    print(text, file=sys.stderr, flush=True)


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InvalidRequest.of("prompt", f"line {number} is not valid UTF-8") from error
        if text.strip():
            yield text
