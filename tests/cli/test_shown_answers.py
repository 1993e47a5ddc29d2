"""Commands that documents show with their output print exactly that, at models that compute in float32.

A document shows them in blocks of the language `console`: a command behind "$ ", with all lines of its quoted texts and
those that a backslash continues, then its output. Commands without output start, stop or change something; they are not
run. `cat FILE` shows a file that the commands behind it read; "..." stands for the rest of a line.
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.routing.features import Features
from gateway.routing.router import Router
from sluice.settings import GatewaySettings, HttpSettings, Settings
from sluice.settings.shipped import CHAT, GENERAL_ROUTING, SPECIALISTS
from supervisor.mesh import running_mesh
from tests.cli.commands import Cli, Ran
from tests.interop.tools import Ran as Program
from tests.interop.tools import run
from tests.support.chat_model import CACHE, needs_chat_model
from tests.support.mesh import RunningMesh

pytestmark = pytest.mark.mesh

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "examples/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*\n(?:(?!\$ ).*\n)*)", re.MULTILINE)
GENERATE = re.compile(r"sluice generate[^\n`\"]* \"")
WITH_OTHER_MODELS = {"docs/use/own-models.md", "docs/use/tools.md"}
"""Pages whose examples need a model that is not shipped."""


@dataclass(frozen=True)
class Shown:
    """A command of a page, the output that the page shows, and the files of its block."""

    page: str
    command: str
    output: str
    files: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.command.split())[:60]}"


def shown_in(page: Path) -> Iterator[Shown]:
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        files = dict[str, str]()
        for text in COMMAND.findall(block):
            command, output = split_output(text)
            if command.startswith("cat "):
                files[command.split()[1]] = output
            elif output:
                name = str(page.relative_to(ROOT))
                yield Shown(name, command.replace("\\\n", " "), output, files)


def split_output(text: str) -> tuple[str, str]:
    """A command, as long as a quote is open or a backslash ends the line, and the lines behind it."""
    lines = text.splitlines(keepends=True)
    for count in range(1, len(lines) + 1):
        command = "".join(lines[:count])
        try:
            shlex.split(command, comments=True)
        except ValueError:
            continue
        if not command.endswith("\\\n"):
            return command, "".join(lines[count:])
    raise AssertionError(f"a command without an end: {text}")


def prompts_in(shown: Shown) -> list[str]:
    """The prompts that a command sends for `auto` to choose the model."""
    words = shlex.split(shown.command, comments=True)
    if "-d" in words:
        body = json.loads(words[words.index("-d") + 1])
        requests = body.get("requests", [body])
        return [
            one.get("prompt") or one["messages"][-1]["content"]
            for one in requests
            if any(one.values())
        ]
    return [word for word in words if " " in word] if "generate" in words else []


ROUTER = Router(GENERAL_ROUTING, {model.name: model for model in (*SPECIALISTS, CHAT)})
SHOWN = [shown for page in PAGES for shown in shown_in(page)]
GENERAL = [
    shown
    for shown in SHOWN
    if any(
        ROUTER.plan(Features(None, text=prompt)).model == CHAT.name for prompt in prompts_in(shown)
    )
]
"""Those that the general model answers where it is served."""


def test_few_shown_commands_need_the_general_model() -> None:
    prompts = [prompt for shown in GENERAL for prompt in prompts_in(shown)]
    assert prompts == ["What is the capital of France?"]


@pytest.mark.parametrize("shown", [shown for shown in SHOWN if shown not in GENERAL], ids=str)
async def test_command_prints_what_its_page_shows(
    shown: Shown, cli: Cli, mesh: RunningMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await check_output(shown, cli, mesh.address, mesh.http)


@pytest.mark.long
@needs_chat_model
async def test_default_mesh_prints_what_pages_show(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLUICE_MODEL_CACHE", str(CACHE))
    models = tuple(model.model_copy(update={"dtype": "float32"}) for model in (*SPECIALISTS, CHAT))
    settings = Settings(
        models=models,
        gateway=GatewaySettings(address="127.0.0.1:0"),
        http=HttpSettings(address="127.0.0.1:0"),
    )
    async with running_mesh(settings) as mesh:
        assert mesh.http is not None
        for shown in SHOWN:
            await check_output(shown, cli, mesh.address, mesh.http)


async def check_output(shown: Shown, cli: Cli, address: str, http: str) -> None:
    write_files(shown.files)
    words = shlex.split(shown.command, comments=True)
    pipe = words.index("|") if "|" in words else len(words)
    output = await output_of(words[:pipe], cli, address, http)
    if words[pipe:]:
        assert words[pipe + 1 : pipe + 3] == ["jq", "-r"], "the only filter that the test knows"
        output = f"{chosen(json.loads(output), words[pipe + 3])}\n"
    expected = re.escape(shown.output).replace(re.escape("..."), ".*")
    assert re.fullmatch(expected, output), f"{output!r} is not {shown.output!r}"


def write_files(files: Mapping[str, str]) -> None:
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")


async def output_of(words: Sequence[str], cli: Cli, address: str, http: str) -> str:
    """What a command prints that ends well, at the mesh of an address."""
    words = [word.replace("127.0.0.1:8000", http) for word in words]
    ran: Ran | Program
    if words[0].endswith("sluice"):
        ran = await cli(*words[1:], "--address", address)
    else:
        ran = await run(*(grpc_call(words, address) if words[0] == "grpcurl" else words))
    assert ran.code == 0, ran.err
    return ran.out


def grpc_call(words: Sequence[str], at: str) -> Sequence[str]:
    """`grpcurl`, or where it is not installed the same call with `buf curl`."""
    _, plaintext, data, request, address, method = words
    assert (plaintext, data, address) == ("-plaintext", "-d", "127.0.0.1:50051")
    if shutil.which("grpcurl"):
        return ["grpcurl", plaintext, data, request, at, method]
    buf = str(Path(sys.executable).with_name("buf"))
    options = ["--protocol", "grpc", "--http2-prior-knowledge", "--data", request]
    return [buf, "curl", *options, f"http://{at}/{method}"]


def chosen(value: Any, path: str) -> str:
    """The text that a path of jq leads to, such as `.choices[0].text`."""
    for key in re.findall(r"\w+", path):
        value = value[int(key) if key.isdigit() else key]
    return str(value)


def test_pages_show_what_their_prompts_give() -> None:
    without = {
        str(page.relative_to(ROOT))
        for page in PAGES
        if GENERATE.search(BLOCK.sub("", page.read_text(encoding="utf-8")))
    }
    assert without - WITH_OTHER_MODELS == set()
    assert len(SHOWN) > 8
