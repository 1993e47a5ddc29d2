"""`sluice transcribe`: what it asks and prints."""

from pathlib import Path

from sluice import errors
from sluice.v1 import inference_pb2 as pb
from tests.cli.commands import Cli
from tests.support.scripted import Fail, ScriptedService, delta, finished, started

WHOLE = [started(), delta(0, "ab"), delta(2, "c"), finished()]


async def test_a_file_and_its_options_travel(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    file.write_bytes(b"RIFF samples")
    async with ScriptedService.serve([WHOLE]) as service:
        ran = await cli(
            *("transcribe", str(file), "--language", "de", "--prompt", "Sluice", "--translate"),
            *("--model", "ears", "--temperature", "0.5", "--address", service.address),
        )
    assert (ran.code, ran.out) == (0, "abc\n")
    request = service.requests[0]
    assert request.audio == pb.AudioInput(
        data=b"RIFF samples", format=pb.AUDIO_FORMAT_WAV, language="de", prompt="Sluice",
        task=pb.AUDIO_TASK_TRANSLATE,
    )  # fmt: skip
    assert (request.model, request.sampling.temperature) == ("ears", 0.5)


async def test_stdin_is_a_file(cli: Cli) -> None:
    async with ScriptedService.serve([WHOLE]) as service:
        ran = await cli("transcribe", "-", "--address", service.address, stdin=b"RIFF")
    assert ran.code == 0
    assert service.requests[0].audio.data == b"RIFF"
    assert service.requests[0].audio.task == pb.AUDIO_TASK_TRANSCRIBE


async def test_what_is_wrong_is_said(cli: Cli, tmp_path: Path) -> None:
    missing = await cli("transcribe", str(tmp_path / "no.wav"))
    assert missing.code != 0
    assert "no.wav: No such file or directory" in missing.err
    refused = errors.InvalidRequest.of("audio.data", "is not a WAV file")
    async with ScriptedService.serve([[Fail(refused)]]) as service:
        ran = await cli("transcribe", "-", "--address", service.address, stdin=b"x")
    assert ran.code != 0
    assert "is not a WAV file" in ran.err
