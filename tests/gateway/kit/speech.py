"""A model that takes audio, of which the gateway reads the folder alone: it hears 2 s at a time."""

from pathlib import Path

from sluice.internal.v1.frame_pb2 import TASK_END_STOP
from sluice.internal.v1.task_pb2 import Task
from sluice.settings import ModelSettings
from sluice.v1.inference_pb2 import AUDIO_FORMAT_PCM, AudioInput, GenerateRequest
from tests.gateway.kit.batcher import frame
from tests.gateway.kit.wire import Wire
from tests.support.tiny_whisper import CHUNK_S, END, save_whisper_files

MODEL = "ears"


def speech_model(
    folder: Path, name: str = MODEL, chunk_s: int = CHUNK_S, times: int = 0
) -> ModelSettings:
    """It, in ``folder``."""
    return ModelSettings(name=name, path=str(save_whisper_files(folder, chunk_s, times)))


def heard(pcm: bytes, language: str = "en", **fields: object) -> GenerateRequest:
    """A request to write down ``pcm``."""
    audio = AudioInput(data=pcm, format=AUDIO_FORMAT_PCM, language=language)
    return GenerateRequest(audio=audio, model=MODEL, **fields)  # type: ignore[arg-type]


async def say(wire: Wire, task: Task, *words: int) -> None:
    """The whole answer of a row."""
    await wire.batcher.send(task, frame(0, [*words, END], end=TASK_END_STOP))
