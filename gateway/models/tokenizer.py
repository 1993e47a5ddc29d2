"""The tokenizer and the chat template of a model.

A caller's text must never become a control token (`<|assistant|>`, `</s>`), or it could end its own turn and speak
as the assistant. So a conversation whose contents may hold one is encoded twice: in one piece, as Hugging Face does;
and in parts, the template with placeholders for the contents, and the contents by a tokenizer that treats control
tokens as plain text. If both encodings have the same control tokens, all of these are the template's, and the first is
used; else the second.

Templates are rendered in a sandbox, because they are code that came with a model. They follow transformers' chat
templating: blocks are trimmed; `raise_exception`, `strftime_now` and a `tojson` that keeps non-ASCII characters
exist; `{% generation %}` has no effect.
"""

import json
import logging
import re
import secrets
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding, Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from gateway.models.sentence_pieces import PieceTokenizer
from gateway.models.speech import SpeechTokens
from gateway.models.tools import ToolFormat, map_texts
from sluice.settings import SettingsError

logger = logging.getLogger(__name__)

_NONCE: Final = secrets.token_hex(8)
"""Part of the placeholders. It never leaves the process, so no content can contain it."""
_PLACE: Final = re.compile(f"\ue000{_NONCE}(\\d+)\ue001")
DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
"""Names by which transformers chooses between several templates."""
_FAULTS: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
)
"""Exceptions by which a template fails on a conversation."""
_NONE: Final[Mapping[Any, Any]] = MappingProxyType({})
_PRINTED: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
"""Bytes that byte-level vocabularies write as the character of the same code; the others follow from 256 on."""
_BYTE_LEVEL: Final[Mapping[str, int]] = {
    **{chr(byte): byte for byte in _PRINTED},
    **{chr(256 + at): byte for at, byte in enumerate(sorted({*range(256)}.difference(_PRINTED)))},
}
_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
"""SentencePiece token for one byte of a character that is not in the vocabulary."""


class ControlToken(Exception):
    """One of the caller's tokens is a control token; the arguments are its text and its id."""


class TemplateRefused(Exception):
    """The template does not accept this conversation; the message is the template's own, if it has one."""


class _RaisedByTemplate(jinja2.TemplateError):
    """The error of a template that calls `raise_exception`."""


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's tokens for training: only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012, jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template, or its templates by name: `DEFAULT`, and `TOOL_USE` for requests with tools."""

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime],
    ) -> None:
        """Compile the templates.

        Args:
            source: The template, or templates by name.
            special_tokens: Variables such as `bos_token`.
            now: Returns the local time, for templates that ask for it.

        Raises:
            SettingsError: A template is invalid.
        """
        self._special_tokens = special_tokens
        environment = _environment(now)
        self._templates = {
            name: _compiled(environment, name, text)
            for name, text in ({DEFAULT: source} if isinstance(source, str) else source).items()
        }

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = _NONE,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the prompt, up to where the assistant begins to speak.

        Messages and tools are as in transformers' chat templating: functions with their schemas, arguments as objects.

        Raises:
            TemplateRefused: The template refuses these messages or fails on them, or there is none without tools.
        """
        templates = self._templates
        template = (templates.get(TOOL_USE) if tools else None) or templates.get(DEFAULT)
        if template is None:
            raise TemplateRefused(
                f"the model only has templates for {', '.join(templates)}; call it with tools, or ask its operator for "
                "a template called default"
            )
        try:
            return template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=list(tools) or None,
                documents=None,
                **{**self._special_tokens, **variables},
            )
        except _RaisedByTemplate as error:
            raise TemplateRefused(str(error)) from error
        except _FAULTS as error:
            # The text of the error is not logged, because it may quote the prompt.
            line = traceback.extract_tb(error.__traceback__)[-1].lineno
            logger.info(
                "chat template failed on a conversation: %s (line %s)", type(error).__name__, line
            )
            raise TemplateRefused(
                "it fails on this order of roles, or on what they hold"
            ) from error


def _compiled(environment: ImmutableSandboxedEnvironment, name: str, text: str) -> jinja2.Template:
    try:
        template = environment.from_string(text)
    except jinja2.TemplateError as error:
        which = "" if name == DEFAULT else f" {name}"
        raise SettingsError(f"the chat template{which} is not valid: {error}") from error
    # Each rendering copies the globals, which takes longer for jinja2's ChainMap than for a dict.
    template.globals = dict(template.globals)
    return template


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise _RaisedByTemplate(message)


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token with its place in the text: its characters, and the word that it is a part of."""

    token_id: int
    start: int
    end: int
    word: tuple[int, int | None]


@dataclass(frozen=True)
class Segment:
    """A part of a text, for a model with a short context.

    Attributes:
        token_ids: Tokens of the part with those that the tokenizer adds around a text.
        lead: Number of tokens that the tokenizer adds before the text.
        tokens: Tokens of the part alone.
    """

    token_ids: list[int]
    lead: int
    tokens: Sequence[PlacedToken]


@dataclass(frozen=True, slots=True)
class TokenText:
    """Text and bytes of a token.

    Attributes:
        text: Text, with U+FFFD for incomplete characters.
        data: Bytes of the token.
    """

    text: str
    data: bytes


@dataclass
class ModelTokenizer:
    """Tokenizer, template and limits of one model.

    Attributes:
        tokenizer: The tokenizer.
        template: Chat template; None if the model has none.
        context_tokens: Most tokens of prompt and answer together, by the model's configuration.
        vocab_size: Size of the vocabulary.
        stop_token_ids: Tokens that end an answer.
        begin_token_ids: Tokens that may precede a text: its beginning, and the end of a text before it.
        labels: Labels of a classifier, by number.
        tool_format: How the model writes tool calls; None if it cannot, or its template takes no tools.
        marks_reasoning: Whether the text of an answer marks its reasoning, see `sluice.wire.text_tokens`.
        pieces: Tokenizer of prompts where `tokenizer` is only for answers.
        speech: Control tokens of a model that takes audio. They have no text in answers, even those that the tokenizer
            does not list as special, such as Whisper's timestamps.
        token_chars_max: Characters of the longest token, to estimate the least number of tokens of a text.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    context_tokens: int
    vocab_size: int
    stop_token_ids: frozenset[int]
    begin_token_ids: frozenset[int] = frozenset()
    labels: tuple[str, ...] = ()
    tool_format: ToolFormat | None = None
    marks_reasoning: bool = False
    pieces: PieceTokenizer | None = None
    speech: SpeechTokens | None = None
    token_chars_max: int = field(init=False)
    _plain: "PlainTextEncoder" = field(init=False)
    _frames: dict[int, tuple[tuple[int, ...], ...]] = field(init=False, default_factory=dict)
    _texts: dict[int, str] | None = field(init=False, default=None)
    """Texts by token, shared by all detokenizers; None if the text of a token depends on those before it."""
    _token_texts: dict[tuple[int, bool], TokenText] = field(init=False, default_factory=dict)
    _decoders: str = field(init=False)
    """Description of the decoder, which contains the names of its parts."""
    _neutral_id: int = field(init=False)
    """A token of text, to decode others behind it instead of at the beginning of a text."""

    def __post_init__(self) -> None:
        self._plain = PlainTextEncoder(self.tokenizer)
        if isinstance(self.tokenizer.decoder, ByteLevel) and self.speech is None:
            self._texts = {}
        vocabulary = self.tokenizer.get_vocab()
        self.token_chars_max = max(map(len, vocabulary), default=1)
        self._decoders = repr(self.tokenizer.decoder)
        self._neutral_id = next((vocabulary[name] for name in "a." if name in vocabulary), 0)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = _NONE,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the tokens of a conversation in the chat template; arguments are as of `ChatTemplate.render`.

        Raises:
            TemplateRefused: The template does not accept this conversation.
        """
        assert self.template is not None, "callers check for a template"
        whole = self._encode(self.template.render(messages, variables, tools))
        # The second encoding is only needed if a content may hold a control token.
        is_plain = self._plain.has_no_control
        if not tools and all(
            "tool_calls" not in message and is_plain(message["content"] or "")
            for message in messages
        ):
            return whole
        parts = self._encode_in_parts(self.template, messages, variables, tools)
        same = self._plain.control_of(whole) == self._plain.control_of(parts)
        return whole if same else parts

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of `text` without a template, with those that the tokenizer adds to every text."""
        return self.framed(self.bare(text))[0]

    def token_ends(self, text: str) -> list[int]:
        """Return where each token of `text` ends, in characters, without those that the tokenizer adds."""
        if self.pieces is not None:
            return self.pieces.ends(text)
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        # Some tokenizers give no offsets for a token of blanks alone.
        return list(accumulate((end for _, end in offsets), max))

    def segments(self, text: str, tokens_max: int) -> list[Segment]:
        """Split `text` into segments of at most `tokens_max` tokens.

        Neighbours share a quarter, so that what one segment cuts is whole in the next.
        """
        first, last = self._frame(1)  # often [CLS] text [SEP]
        room = max(1, tokens_max - len(first) - len(last))
        tokens = self._plain.place(text)
        rest = len(tokens) - room // 4 if len(tokens) > room else 1
        starts = range(0, rest, room - room // 4)
        parts = [tokens[start : start + room] for start in starts]
        return [
            Segment([*first, *(token.token_id for token in part), *last], len(first), part)
            for part in parts
        ]

    def bare(self, text: str) -> list[int]:
        """Return the tokens of `text` without those that the tokenizer adds."""
        return self._plain.encode(text) if self.pieces is None else self.pieces.encode(text)

    def framed(self, *texts: Sequence[int]) -> tuple[list[int], int]:
        """Return one text or two with the tokens that the tokenizer adds, and where the last text begins."""
        first, *between, last = self._frame(len(texts))
        token_ids = [*first, *texts[0]]
        for added, text in zip(between, texts[1:], strict=True):
            token_ids += [*added, *text]
        return [*token_ids, *last], len(token_ids) - len(texts[-1])

    @property
    def lead(self) -> list[int]:
        """Tokens that the tokenizer adds before every text."""
        return list(self._frame(1)[0])

    def added(self, texts: int) -> int:
        """Return the number of tokens that the tokenizer adds to one text or to two."""
        return sum(map(len, self._frame(texts)))

    def _frame(self, texts: int) -> tuple[tuple[int, ...], ...]:
        """Return the tokens that are added before, between and after texts; often [CLS] text [SEP] text [SEP]."""
        frames = self._frames
        if texts not in frames:
            # Any text with at least one token will do.
            candidates = (text for text in ("a", *self.tokenizer.get_vocab()) if self.bare(text))
            text = next(candidates, "a")
            sample = self.tokenizer.encode(text, text if texts == 2 else None)
            parts: list[list[int]] = [[]]
            before = None
            for token_id, sequence in zip(sample.ids, sample.sequence_ids, strict=True):
                if sequence is None:  # an added token
                    parts[-1].append(token_id)
                elif sequence != before:
                    parts.append([])
                before = sequence
            frames[texts] = tuple(map(tuple, parts))
        return frames[texts]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, without a first token that may precede a text.

        Raises:
            ControlToken: Another one is a control token.
        """
        begins = token_ids and (token_ids[0] in self.begin_token_ids or token_ids[0] in self.lead)
        rest = list(token_ids[1:] if begins else token_ids)
        if control := self._plain.control_of(rest):
            raise ControlToken(self.tokenizer.id_to_token(control[0]) or "", control[0])
        return str(self.tokenizer.decode(rest, skip_special_tokens=False))

    def detokenizer(self, *, tools: bool = False, stops: Sequence[str] = ()) -> "Detokenizer":
        """Return a detokenizer for one answer.

        Special tokens have no text, except `stops` and, with `tools`, those around calls of tools.
        """
        texts = list(stops)
        if tools and self.tool_format is not None:
            texts += (self.tool_format.opening, self.tool_format.closing)
        marks = {
            token_id: text for text in texts if (token_id := self.special_id(text)) is not None
        }
        hidden = self.speech.control if self.speech else ()
        return Detokenizer(self.tokenizer, marks, hidden, texts=self._texts)

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this text, or None."""
        token_id = self.tokenizer.token_to_id(text) if text else None
        added = {} if token_id is None else self.tokenizer.get_added_tokens_decoder()
        return token_id if token_id in added and added[token_id].special else None

    def token_text(self, token_id: int, is_first: bool = False) -> TokenText:
        """Return text and bytes of a token, at the beginning of a text or after other text."""
        cached = self._token_texts.get((token_id, is_first))
        if cached is None:
            cached = self._token_texts[token_id, is_first] = self._token_text(token_id, is_first)
        return cached

    def _token_text(self, token_id: int, is_first: bool) -> TokenText:
        added = self.tokenizer.get_added_tokens_decoder()
        name = self.tokenizer.id_to_token(token_id)
        if token_id in added or name is None:
            text = added[token_id].content if token_id in added else ""
            return TokenText(text, text.encode())
        data = self._bytes_of(name)
        if data is not None:
            return TokenText(data.decode(errors="replace"), data)
        # Decoders may strip a blank at the beginning of a text, so other tokens are decoded after a neutral one.
        before = [] if is_first else [self._neutral_id]
        prefix = self.tokenizer.decode(before, skip_special_tokens=False)
        text = self.tokenizer.decode([*before, token_id], skip_special_tokens=False)[len(prefix) :]
        return TokenText(text, text.encode())

    def _bytes_of(self, name: str) -> bytes | None:
        """Return the bytes that the vocabulary writes as `name`, or None if the name is text."""
        if "ByteLevel" in self._decoders and _BYTE_LEVEL.keys() >= set(name):
            return bytes(_BYTE_LEVEL[char] for char in name)
        if "ByteFallback" in self._decoders and (byte := _BYTE.fullmatch(name)):
            return bytes.fromhex(byte[1])
        return None

    def _encode(self, text: str) -> list[int]:
        # Skips the offsets of the tokens, which takes four fifths of the time.
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode_in_parts(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        hidden: list[str] = []

        def hide(text: str) -> str:
            hidden.append(text)
            return f"\ue000{_NONCE}{len(hidden) - 1}\ue001"

        def hide_control(text: str) -> str:
            return hide(text) if self._plain.may_hold_control(text) else text

        places = [{**m, "content": m["content"] and hide(m["content"])} for m in messages]
        contents = len(hidden)
        for place in places:
            if "tool_calls" in place:
                place["tool_calls"] = map_texts(place["tool_calls"], hide_control)
        offered = map_texts(list(tools), hide_control)
        pieces = _PLACE.split(template.render(places, variables, offered))
        token_ids: list[int] = []
        for index, piece in enumerate(pieces):
            # Between the pieces of the template stand the numbers of placeholders.
            if index % 2 == 0:
                token_ids += self._encode(piece)
                continue
            text, in_json = hidden[int(piece)], int(piece) >= contents
            # The template wrote the placeholder into a JSON string, where the text would be escaped.
            if in_json and pieces[index - 1].endswith('"'):
                text = json.dumps(text, ensure_ascii=False)[1:-1]
            token_ids += self._plain.encode(text)
        return token_ids


class Detokenizer:
    """The text of a growing list of tokens; special and `hidden` tokens have none, except `marks`.

    A byte-level tokenizer may split one character over several tokens. Until it is complete, the text is held back;
    tokenizers' `DecodeStream` keeps track of that.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        marks: Mapping[int, str] = _NONE,
        hidden: Collection[int] = (),
        texts: dict[int, str] | None = None,
    ) -> None:
        """Start an answer; `texts` caches the text of tokens, for all answers of a byte-level tokenizer."""
        self._tokenizer = tokenizer
        self._marks = marks
        self._hidden = hidden
        self._texts = texts
        self._stream = DecodeStream(skip_special_tokens=True)
        # Tokens of the last text, and those held back since: enough context to decode the latter.
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes; may be empty."""
        # Whole characters do not depend on earlier tokens, so the stream need not see them.
        if self._texts is not None and not self._pending and token_id in self._texts:
            return self._texts[token_id]
        # A mark ends the text before it, and the next text starts afresh.
        if token_id in self._marks:
            before, self._context = self.flush(), []
            self._stream = DecodeStream(skip_special_tokens=True)
            return before + self._marks[token_id]
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # "Invalid prefix": some decoders change earlier text in hindsight. Decode the pending tokens
            # without the stream, and start a new one.
            text = self._pending_text()
            self._stream = DecodeStream(skip_special_tokens=True)
        if text is None:
            return ""
        if self._texts is not None and len(self._pending) == 1:
            self._texts[token_id] = text
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """Return the text that was held back, when no more tokens come, with U+FFFD for incomplete characters."""
        text = self._pending_text()
        self._context, self._pending = self._pending, []
        return text

    def _pending_text(self) -> str:
        released = self._tokenizer.decode(self._context, skip_special_tokens=True)
        both = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=True)
        return both[len(released) :]


class PlainTextEncoder:
    """An encoder for a caller's text, which never becomes a control token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        serialized = json.loads(tokenizer.to_str())
        # The token for unknown characters is special, but controls nothing.
        unknown = _unknown_of(serialized["model"])
        self._control = dict[int, str]()
        for token in serialized["added_tokens"]:
            if token["special"] or _is_mark(token["content"]):
                token["special"] = True
                if token["content"] != unknown:
                    self._control[token["id"]] = token["content"]
        self._tokenizer = Tokenizer.from_str(json.dumps(serialized))
        # In tokenizers this means: treat the text of special tokens as plain text.
        self._tokenizer.encode_special_tokens = True
        edges = {char for token in self._control.values() for char in (token[0], token[-1])}
        self._edges = re.compile(f"[{re.escape(''.join(edges))}]" if edges else "(?!)", re.I)
        self._control_chars_max = max(map(len, self._control.values()), default=0)
        self._firsts = {content[0] for content in self._control.values()}

    def may_hold_control(self, text: str) -> bool:
        """Return whether `text` may hold the text of a control token: a quick check."""
        return not self._firsts.isdisjoint(text)

    def has_no_control(self, text: str) -> bool:
        """Return whether `text` cannot be a part of a control token, whatever a template writes around it.

        A token that begins or ends in the text has its first or last character there; otherwise all of the text is
        inside of it. Only ASCII is accepted, because other characters may be normalized to it.
        """
        if not text.isascii() or self._edges.search(text) is not None:
            return False
        bare = text.strip()
        return len(bare) >= self._control_chars_max or not any(
            bare in token for token in self._control.values()
        )

    def control_of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the control tokens among `token_ids`, in order."""
        return [token_id for token_id in token_ids if token_id in self._control]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, without those that the tokenizer adds to every text."""
        token_ids = list(self._bare(text).ids)
        if self.control_of(token_ids):
            return [token.token_id for token in self.place(text)]
        return token_ids

    def place(self, text: str) -> list[PlacedToken]:
        """Return the tokens of `text` with their places in it."""
        whole = self._bare(text)
        if not self.control_of(whole.ids):
            return list(self._placed(text, whole, 0))
        placed: list[PlacedToken] = []
        begin = 0
        # Some unigram vocabularies have control tokens as words, so their text is cut and encoded in pieces.
        for piece in self._cut(text):
            placed += self._placed(text, self._bare(piece), begin)
            begin += len(piece)
        return [token for token in placed if token.token_id not in self._control]

    def _placed(self, text: str, encoding: Encoding, begin: int) -> Iterator[PlacedToken]:
        """Yield the tokens of a piece of `text` that begins at `begin`."""
        # Without a pre-tokenizer, all text would count as one word.
        words = encoding.word_ids if self._tokenizer.pre_tokenizer else range(len(encoding.ids))
        for token_id, (start, end), word in zip(encoding.ids, encoding.offsets, words, strict=True):
            blanks = end - start - len(text[begin + start : begin + end].lstrip())
            yield PlacedToken(token_id, begin + start + blanks, begin + end, (begin, word))

    def _bare(self, text: str) -> Encoding:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _cut(self, text: str) -> list[str]:
        """Split `text` after the first character of each control token in it."""
        control = sorted(self._control.values(), key=len, reverse=True)
        pattern = "|".join(f"(?<={re.escape(c[0])})(?={re.escape(c[1:])})" for c in control)
        return re.split(pattern, text)


def _unknown_of(model: Mapping[str, Any]) -> str | None:
    """Return the token of a vocabulary for unknown characters, or None; unigram models have its number."""
    number = model.get("unk_id")
    return model.get("unk_token") if number is None else str(model["vocab"][number][0])


def _is_mark(content: str) -> bool:
    """Return whether an added token is a mark such as `<think>`, which some models do not declare as special."""
    return len(content) > 2 and (content[0], content[-1]) in {("<", ">"), ("[", "]")}
