"""Validates the audio of a request, and what is asked with it."""

from dataclasses import dataclass

from gateway.models.catalog import Catalog
from gateway.models.speech import BYTES_A_SECOND, SAMPLE_BYTES, BadAudio, pcm_of_wav
from gateway.validation.conversation import FieldViolations, model_among
from sluice.defaults import AUTO
from sluice.v1 import inference_pb2
from sluice.v1.inference_pb2 import AudioInput, GenerateRequest


@dataclass(frozen=True)
class ValidAudio:
    """Speech, and what to do with it.

    Attributes:
        pcm: the samples, as a task has them.
        language: empty: the model finds it.
    """

    pcm: bytes
    language: str
    translate: bool


def audio_of(
    request: GenerateRequest, catalog: Catalog, audio_max_s: float, found: FieldViolations
) -> ValidAudio:
    """The audio of ``request``; what is wrong with it goes into ``found``."""
    audio = request.audio
    pcm = _pcm(audio, found)
    seconds = len(pcm) / BYTES_A_SECOND
    found.check(
        seconds <= audio_max_s,
        "audio.data",
        f"has {seconds:.1f} s, the limit is {audio_max_s:g} s (gateway.audio_max_s): cut it",
    )
    _check_unused(request, found)
    known = inference_pb2.AudioTask.values()
    found.check(audio.task in known, "audio.task", "is none of the known tasks")
    valid = ValidAudio(
        pcm, audio.language.lower(), audio.task == inference_pb2.AUDIO_TASK_TRANSLATE
    )
    _check_model(request, valid, catalog, found)
    return valid


def audio_model(name: str, catalog: Catalog, found: FieldViolations) -> str | None:
    """The model that gets the audio: the named one, else the only one; as `model_among`."""
    known = ", ".join(catalog.hearing)
    takes = f"name one that does: {known}" if known else "no model of this mesh does"
    wrong, none = f"{name} takes no audio; {takes}", "no model of this mesh takes audio"
    return model_among(catalog.hearing, name, catalog, found, none, wrong)


def _pcm(audio: AudioInput, found: FieldViolations) -> bytes:
    pcm = audio.data
    if audio.format not in inference_pb2.AudioFormat.values():
        found.add("audio.format", "is none of the known formats")
        return b""
    if audio.format != inference_pb2.AUDIO_FORMAT_PCM:
        try:
            pcm = pcm_of_wav(pcm)
        except BadAudio as error:
            found.add("audio.data", str(error))
            return b""
    elif len(pcm) % SAMPLE_BYTES:
        found.add("audio.data", "has half a sample: samples have 2 bytes")
    pcm = pcm[: len(pcm) // SAMPLE_BYTES * SAMPLE_BYTES]
    found.check(bool(pcm), "audio.data", "has no samples")
    return pcm


def _check_unused(request: GenerateRequest, found: FieldViolations) -> None:
    """What a request with audio cannot ask for."""
    found.check(not request.raw_prompt, "raw_prompt", "needs prompt, not audio")
    found.check(not request.tools, "tools", "need a prompt or a chat, not audio")
    constraint = request.sampling.WhichOneof("constraint")
    found.check(constraint is None, f"sampling.{constraint}", "needs a prompt or a chat, not audio")


def _check_model(
    request: GenerateRequest, audio: ValidAudio, catalog: Catalog, found: FieldViolations
) -> None:
    """What the model must know; nothing where `audio_model` finds none."""
    named = [name for name in catalog.hearing if request.model in ("", AUTO, name)]
    if len(named) != 1:
        return
    speech = catalog[named[0]].speech
    assert speech is not None, "it takes audio"
    known = ", ".join(sorted(speech.languages)) or "it has one alone: leave it out"
    found.check(
        not audio.language or audio.language in speech.languages,
        "audio.language",
        f"{named[0]} has no language of that name; known: {known}",
    )
    found.check(
        not audio.translate or "translate" in speech.tasks,
        "audio.task",
        f"{named[0]} does not translate",
    )
    found.check(
        not request.audio.prompt or speech.previous is not None,
        "audio.prompt",
        f"{named[0]} takes none: its tokenizer has no <|startofprev|>",
    )
