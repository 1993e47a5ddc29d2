"""Serve /v1/audio/transcriptions and /v1/audio/translations: a form with speech, answered as JSON, text or events."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from typing_extensions import override

from gateway.http.answers import HttpAnswer, encode, sse
from gateway.http.call import SSE, HttpCall
from gateway.http.multipart import FileForm
from gateway.models.catalog import Catalog
from gateway.models.speech import BYTES_A_SECOND, HEAD_BYTES, BadAudio, pcm_of_wav
from sluice.errors import InvalidRequest, MessageTooLarge
from sluice.v1 import inference_pb2 as pb

TRANSCRIPTIONS: Final = "/v1/audio/transcriptions"
TRANSLATIONS: Final = "/v1/audio/translations"
TEXT: Final = "text"
FORMATS: Final = ("json", TEXT, "verbose_json")
_SWITCH: Final = ("false", "true")
EVENTS: Final = "events"
"""The format of an answer that is streamed."""
HEADS: Final[Mapping[str, Mapping[str, str]]] = {
    EVENTS: SSE,
    TEXT: {"content-type": "text/plain; charset=utf-8"},
}
"""Headers of answers, by format; formats without an entry are JSON."""
UNKNOWN: Final = "und"
"""ISO 639 code of an unknown language."""
_FIELDS: Final = frozenset({"model", "prompt", "response_format", "temperature"})
_OF_TRANSCRIPTIONS: Final = _FIELDS | {"language", "stream"}


class SpokenText(HttpAnswer):
    """The text of one call's audio."""

    def __init__(self, request: pb.GenerateRequest, answer_format: str, catalog: Catalog) -> None:
        """Create the answer; `answer_format` is one of `FORMATS`, or `EVENTS`."""
        super().__init__()
        self._text = ""
        self._audio = request.audio
        self._format = answer_format
        self._catalog = catalog
        self._first_token: list[int] = []
        """The first token of the answer, which may name the language; empty until it is known."""

    @override
    def add(self, index: int, delta: pb.Delta) -> bytes:
        """Add a piece of the text, which does not begin with blanks."""
        self._first_token = self._first_token or list(delta.token_ids[:1])
        new = delta.text if self._text else delta.text.lstrip()
        self._text += new
        return sse({"type": "transcript.text.delta", "delta": new}) if new else b""

    @override
    def end(self) -> bytes:
        text, seconds = self._text.rstrip(), len(self._audio.data) / BYTES_A_SECOND
        body: dict[str, Any] = {
            "text": text,
            "usage": {"type": "duration", "seconds": math.ceil(seconds)},
        }
        if self._format == EVENTS:
            return sse({"type": "transcript.text.done", **body})
        if self._format == TEXT:
            return f"{text}\n".encode()
        if self._format == "verbose_json":
            translates = self._audio.task == pb.AUDIO_TASK_TRANSLATE
            task, language = "translate" if translates else "transcribe", self._language()
            body = {"task": task, "language": language, "duration": seconds, **body}
        return encode(body)

    def _language(self) -> str:
        speech = self._catalog[self.model].tokenizer.speech
        detected = speech.language_of(self._first_token) if speech is not None else ""
        return self._audio.language or detected or UNKNOWN


async def speech_request(call: HttpCall, audio_max_s: float) -> tuple[pb.GenerateRequest, str]:
    """Read the body of `call`; return the request, and the format of its answer: one of `FORMATS`, or `EVENTS`.

    Raises:
        InvalidRequest: A field is unknown or its value is invalid, or the file is not audio.
        MessageTooLarge: The file has more bytes than `audio_max_s` seconds of audio.
        Overloaded: The calls of the tenant keep too many bytes.
        BodyTooSlow: The body did not arrive in time.
        ClientDisconnect: The client has gone.
    """
    form = FileForm(call.metadata.get("content-type", ""))
    translates = call.scope["path"] == TRANSLATIONS
    limit, data = int(audio_max_s * BYTES_A_SECOND) + HEAD_BYTES, bytearray()
    async for piece in call.pieces():
        call.keep(len(piece))
        data += form.feed(piece)
        if len(data) > limit:
            raise MessageTooLarge(
                f"the file has more than {limit} bytes (gateway.audio_max_s); cut it",
                metadata={"limit_bytes": str(limit)},
            )
    form.end()
    try:
        pcm = pcm_of_wav(bytes(data))
    except BadAudio as error:
        raise InvalidRequest.of("file", str(error)) from None
    fields, supported = form.fields, _FIELDS if translates else _OF_TRANSCRIPTIONS
    if unknown := fields.keys() - supported:
        raise InvalidRequest.of(
            min(unknown), f"is not supported; send one of {', '.join(sorted(supported))}"
        )
    shape, streams = _one_of(fields, "response_format", FORMATS), _one_of(fields, "stream", _SWITCH)
    if streams == "true" and shape != FORMATS[0]:
        raise InvalidRequest.of("response_format", "must be json with stream")
    request = pb.GenerateRequest(model=fields.get("model", ""))
    try:
        request.sampling.temperature = float(fields.get("temperature", "0"))
    except ValueError:
        raise InvalidRequest.of("temperature", "must be a number") from None
    audio = request.audio
    audio.data, audio.format = pcm, pb.AUDIO_FORMAT_PCM
    audio.language, audio.prompt = fields.get("language", ""), fields.get("prompt", "")
    audio.task = pb.AUDIO_TASK_TRANSLATE if translates else pb.AUDIO_TASK_TRANSCRIBE
    return request, EVENTS if streams == "true" else shape


def _one_of(fields: Mapping[str, str], name: str, allowed: Sequence[str]) -> str:
    """Return the value of a field, by default the first `allowed` one; raise InvalidRequest for any other."""
    value = fields.get(name, allowed[0])
    if value not in allowed:
        raise InvalidRequest.of(name, f"must be one of {', '.join(allowed)}")
    return value
