"""Validate speech: its format and length, and what the model that hears it can do."""

from dataclasses import dataclass

from gateway.models.catalog import Catalog
from gateway.models.speech import BYTES_A_SECOND, SAMPLE_BYTES, BadAudio, pcm_of_wav
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
    audio, check, names = request.audio, violations.check, ", ".join(catalog.hearing)
    pcm = _pcm(audio, violations)
    seconds = len(pcm) / BYTES_A_SECOND
    limit = f"the limit is {audio_max_s:g} s (gateway.audio_max_s): cut it"
    check(seconds <= audio_max_s, "audio.data", f"has {seconds:.1f} s, {limit}")
    check(not request.raw_prompt, "raw_prompt", "needs prompt, not audio")
    check(not request.tools, "tools", "need a prompt or a chat, not audio")
    constraint = request.sampling.WhichOneof("constraint")
    check(constraint is None, f"sampling.{constraint}", "needs a prompt or a chat, not audio")
    is_task = audio.task in pb.AudioTask.values()
    check(is_task, "audio.task", "must be transcribe or translate")
    valid = ValidAudio(pcm, audio.language.lower(), audio.task == pb.AUDIO_TASK_TRANSLATE)
    remedy = f"name one that does: {names}" if names else "no model of this mesh does"
    wrong, none = f"{request.model} takes no audio; {remedy}", "no model of this mesh takes audio"
    model = model_among(catalog.hearing, request.model, catalog, violations, none, wrong)
    if model is not None:
        speech = catalog[model].tokenizer.speech
        assert speech is not None, "it takes audio"
        languages = ", ".join(sorted(speech.languages)) or "it has one alone: leave it out"
        is_known = not valid.language or valid.language in speech.languages
        unknown = f"{model} has no language of that name; known: {languages}"
        check(is_known, "audio.language", unknown)
        can_translate = not valid.translate or "translate" in speech.tasks
        check(can_translate, "audio.task", f"{model} does not translate")
        takes_prompt = not audio.prompt or speech.previous is not None
        why = "its tokenizer has no <|startofprev|>"
        check(takes_prompt, "audio.prompt", f"{model} takes none: {why}")
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
