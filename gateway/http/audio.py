"""/v1/audio/transcriptions and /v1/audio/translations: speech in a form, its text as JSON, plain text or events."""

import math
from collections.abc import Mapping
from typing import Final

from gateway.api.generate import Generator
from gateway.http import headers as header_fields
from gateway.http.answers import encode, sse
from gateway.http.call import SSE, HttpCall
from gateway.http.multipart import FileForm
from gateway.models.speech import BYTES_A_SECOND, HEAD_BYTES, BadAudio, pcm_of_wav
from sluice.errors import InvalidRequest, MessageTooLarge, UnknownModel
from sluice.v1 import inference_pb2 as pb

TRANSCRIPTIONS: Final = "/v1/audio/transcriptions"
TRANSLATIONS: Final = "/v1/audio/translations"
FORMATS: Final = ("json", "text", "verbose_json")
UNKNOWN: Final = "und"
"""ISO 639's code for a language that is not known."""
_FIELDS: Final = frozenset({"model", "language", "prompt", "response_format", "temperature"})
_STREAMED: Final = _FIELDS | {"stream"}
_TEXT: Final = {"content-type": "text/plain; charset=utf-8"}


class Transcript:
    """The answer to one call, as it grows."""

    def __init__(self) -> None:
        self.request_id = self.model = ""
        self.text = ""
        self.first_tokens: list[int] = []

    def take(self, event: pb.GenerateResponse) -> str:
        """Adds ``event``; returns the text that is new. A text begins with no blank."""
        kind = event.WhichOneof("event")
        if kind == "started":
            self.request_id, self.model = event.started.request_id, event.started.model
        if kind != "delta":
            return ""
        self.first_tokens = self.first_tokens or list(event.delta.token_ids[:1])
        new = event.delta.text if self.text else event.delta.text.lstrip()
        self.text += new
        return new


class Audio:
    """Answers the calls of one URL."""

    def __init__(self, generator: Generator, url: str) -> None:
        self._generator = generator
        self._catalog = generator.upstream.admission.catalog
        self._translates = url == TRANSLATIONS

    async def __call__(self, call: HttpCall) -> None:
        """Answers one call.

        Raises:
            SluiceError, ClientDisconnect: it ends with that.
        """
        if not self._catalog.hearing:
            raise UnknownModel("no model of this mesh takes audio", metadata={"models": ""})
        form = FileForm(call.metadata.get("content-type", ""))
        data = await self._file(call, form)
        request, streams, shape = self._request(form.fields, data)
        timeout_s = header_fields.apply(call.metadata, request, streams=streams)
        transcript = Transcript()

        # The head is sent with the first text: an error before it has a status of its own.
        async def take(event: pb.GenerateResponse) -> None:
            new = transcript.take(event)
            if new and streams:
                delta = {"type": "transcript.text.delta", "delta": new}
                headers = {**SSE, "x-request-id": transcript.request_id}
                await call.write(sse(delta), headers, more=True)

        with call.while_connected():
            await self._generator.answer(request, call.caller, take, timeout_s, call.metadata)
            await self._end(call, transcript, request, shape, streams=streams)

    async def _end(
        self,
        call: HttpCall,
        transcript: Transcript,
        request: pb.GenerateRequest,
        shape: str,
        *,
        streams: bool,
    ) -> None:
        headers = {"x-request-id": transcript.request_id}
        text = transcript.text.rstrip()
        seconds = len(request.audio.data) / BYTES_A_SECOND
        usage = {"type": "duration", "seconds": math.ceil(seconds)}
        if streams:
            done = {"type": "transcript.text.done", "text": text, "usage": usage}
            await call.write(sse(done), {**SSE, **headers})
        elif shape == "text":
            await call.write(f"{text}\n".encode(), {**headers, **_TEXT})
        elif shape == "json":
            await call.write(encode({"text": text, "usage": usage}), headers)
        else:
            verbose = {
                "task": "translate" if self._translates else "transcribe",
                "language": self._language(transcript, request),
                "duration": seconds,
                "text": text,
                "usage": usage,
            }
            await call.write(encode(verbose), headers)

    def _language(self, transcript: Transcript, request: pb.GenerateRequest) -> str:
        speech = self._catalog[transcript.model].speech
        found = speech.language_of(transcript.first_tokens) if speech is not None else ""
        return request.audio.language or found or UNKNOWN

    async def _file(self, call: HttpCall, form: FileForm) -> bytes:
        limit = int(self._generator.settings.audio_max_s * BYTES_A_SECOND) + HEAD_BYTES
        data = bytearray()
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
            return pcm_of_wav(bytes(data))
        except BadAudio as error:
            raise InvalidRequest.of("file", str(error)) from None

    def _request(
        self, fields: Mapping[str, str], pcm: bytes
    ) -> tuple[pb.GenerateRequest, bool, str]:
        """The request, whether its answer is streamed, and its form."""
        known = _FIELDS - {"language"} if self._translates else _STREAMED
        for field in fields:
            if field not in known:
                raise InvalidRequest.of(field, f"is not served; known: {', '.join(sorted(known))}")
        shape, streams = fields.get("response_format", "json"), fields.get("stream", "false")
        if shape not in FORMATS:
            raise InvalidRequest.of("response_format", f"must be one of {', '.join(FORMATS)}")
        if streams not in ("true", "false"):
            raise InvalidRequest.of("stream", "must be true or false")
        if streams == "true" and shape != "json":
            raise InvalidRequest.of("response_format", "must be json with stream")
        request = pb.GenerateRequest(model=fields.get("model", ""))
        request.sampling.temperature = _temperature(fields.get("temperature", "0"))
        audio = request.audio
        audio.data, audio.format = pcm, pb.AUDIO_FORMAT_PCM
        audio.language, audio.prompt = fields.get("language", ""), fields.get("prompt", "")
        audio.task = pb.AUDIO_TASK_TRANSLATE if self._translates else pb.AUDIO_TASK_TRANSCRIBE
        return request, streams == "true", shape


def _temperature(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest.of("temperature", "must be a number") from None
