"""`sluice generate` and `transcribe`: one answer, or the text of a sound file, as it comes."""

from typer import Argument, BadParameter, Option

from cli import options, output
from cli.commands import wants_json
from cli.files import read_input
from sluice.client import Audio, GenerateOptions
from sluice.client.request import AudioTaskName
from sluice.defaults import AUTO


def generate(
    *,
    prompt: str = Argument(..., help='The prompt; "-" reads stdin.', metavar="PROMPT"),
    chosen: options.Sampling,
    logprobs: int | None = Option(None, help="Alternatives for each token; needs --json."),
    raw: bool = Option(False, "--raw", help="Do not apply the chat template."),
    n: int = Option(
        1, help="Number of answers; they differ with --temperature > 0.", min=1, max=16
    ),
    tool: list[str] | None = Option(
        None, help="Function that the model may call; repeatable.", metavar="FILE|TEXT"
    ),
    tool_choice: str | None = Option(
        None, help="Whether, or which, tool is called.", metavar="none|auto|required|NAME"
    ),
    client: options.TenantClient,
) -> None:
    """Ask for one answer, and print it as it comes.

    With --json prints one object when the answer is complete: request_id, trace_id, model, tier, text, finish_reason,
    usage, timings and more; of several answers (--n) one a line. Calls of tools are printed as JSON, one a line, behind
    the text. Ctrl-C cancels the request in the mesh.
    """
    if logprobs is not None and not wants_json():
        raise BadParameter("the log-probabilities are part of --json", param_hint="--logprobs")
    chosen["raw_prompt"] = raw
    if logprobs is not None:
        chosen["logprobs"] = logprobs
    if prompt == "-":
        read = options.text_of(read_input(prompt), "prompt")
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


def transcribe(
    *,
    file: str = Argument(
        ..., help='WAV, 16 kHz, one channel, 16 bits; "-": stdin.', metavar="FILE"
    ),
    language: str = Option("", "--language", "-l", help='Such as "en".', metavar="CODE"),
    prompt: str = Option("", help='The prompt; "-" reads stdin.', metavar="TEXT"),
    translate: bool = Option(False, "--translate", help="Translate into English."),
    model: options.Model = AUTO,
    priority: options.Priority = "interactive",
    temperature: options.Temperature = None,
    client: options.TenantClient,
) -> None:
    """Write down the speech in a file, and print it as it comes.

    With --json prints one object when the text is complete, as `sluice generate` does. Ctrl-C cancels the request in
    the mesh.
    """
    task: AudioTaskName = "translate" if translate else "transcribe"
    audio = Audio(read_input(file), language=language, prompt=prompt, task=task)
    chosen = GenerateOptions(model=model, priority=priority)
    if temperature is not None:
        chosen["temperature"] = temperature
    with client.generate(audio, **chosen) as stream:
        output.write_answer(stream)
