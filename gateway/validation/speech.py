"""Validate speech: its format and length, and what the model that hears it can do."""

from dataclasses import dataclass

from gateway.models.catalog import Catalog
from gateway.models.speech import BYTES_A_SECOND, SAMPLE_BYTES, BadAudio, SpeechTokens, pcm_of_wav
from gateway.validation.conversation import FieldViolations, model_among
from sluice.v1 import inference_pb2 as pb


@dataclass(frozen=True)
class ValidAudio:
    """Speech, and what to do with it.

    Attributes:
        pcm: Samples, as a task has them.
        language: Language of the speech; empty if the model detects it.
        translate: Whether to translate into English.
    """

    pcm: bytes
    language: str
    translate: bool


def audio_of(
    request: pb.GenerateRequest, catalog: Catalog, audio_max_s: float, violations: FieldViolations
) -> tuple[ValidAudio, str | None]:
    """Return the audio of `request` and its model, as `model_among` does; add what is wrong to `violations`."""
    audio, known = request.audio, ", ".join(catalog.hearing)
    pcm = _pcm(audio, violations)
    seconds = len(pcm) / BYTES_A_SECOND
    violations.check(
        seconds <= audio_max_s,
        "audio.data",
        f"has {seconds:.1f} s, the limit is {audio_max_s:g} s (gateway.audio_max_s): cut it",
    )
    violations.check(not request.raw_prompt, "raw_prompt", "needs prompt, not audio")
    violations.check(not request.tools, "tools", "need a prompt or a chat, not audio")
    constraint = request.sampling.WhichOneof("constraint")
    violations.check(
        constraint is None, f"sampling.{constraint}", "needs a prompt or a chat, not audio"
    )
    violations.check(
        audio.task in pb.AudioTask.values(), "audio.task", "must be transcribe or translate"
    )
    valid = ValidAudio(pcm, audio.language.lower(), audio.task == pb.AUDIO_TASK_TRANSLATE)
    remedy = f"name one that does: {known}" if known else "no model of this mesh does"
    wrong, none = f"{request.model} takes no audio; {remedy}", "no model of this mesh takes audio"
    model = model_among(catalog.hearing, request.model, catalog, violations, none, wrong)
    if model is not None:
        _check_speech(request, valid, model, catalog[model].speech, violations)
    return valid, model


def _pcm(audio: pb.AudioInput, violations: FieldViolations) -> bytes:
    pcm = audio.data
    if audio.format not in pb.AudioFormat.values():
        violations.add("audio.format", "must be wav or pcm")
        return b""
    if audio.format != pb.AUDIO_FORMAT_PCM:
        try:
            pcm = pcm_of_wav(pcm)
        except BadAudio as error:
            violations.add("audio.data", str(error))
            return b""
    elif len(pcm) % SAMPLE_BYTES:  # WAV files are cut to whole samples below
        violations.add("audio.data", "ends with half a sample; send 2 bytes for each")
    pcm = pcm[: len(pcm) // SAMPLE_BYTES * SAMPLE_BYTES]
    violations.check(bool(pcm), "audio.data", "has no samples")
    return pcm


def _check_speech(
    request: pb.GenerateRequest,
    audio: ValidAudio,
    model: str,
    speech: SpeechTokens | None,
    violations: FieldViolations,
) -> None:
    """Check that `model` knows the language and can do the task."""
    assert speech is not None, "it takes audio"
    known = ", ".join(sorted(speech.languages)) or "it has one alone: leave it out"
    violations.check(
        not audio.language or audio.language in speech.languages,
        "audio.language",
        f"{model} has no language of that name; known: {known}",
    )
    violations.check(
        not audio.translate or "translate" in speech.tasks,
        "audio.task",
        f"{model} does not translate",
    )
    violations.check(
        not request.audio.prompt or speech.previous is not None,
        "audio.prompt",
        f"{model} takes none: its tokenizer has no <|startofprev|>",
    )
