"""The tokenizer and the chat template of a model.

A caller's text must never become a control token (``<|assistant|>``, ``</s>``), or it could end its own turn and speak
as the assistant. So a conversation is encoded twice: as Hugging Face does, in one piece; and in parts, the template
around placeholders for the contents, and the contents by a tokenizer for which control tokens are plain text. When both
have the same control tokens, all of them are the template's, and the first encoding is used; else the second.

Templates are rendered as Hugging Face's tokenizers do, in a sandbox: a template is code that came with a model. The
conventions are those of transformers' chat templating documentation: blocks are trimmed, ``raise_exception``,
``strftime_now`` and a ``tojson`` that keeps non-ASCII characters exist, and ``{% generation %}`` has no effect.
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

_log = logging.getLogger(__name__)

# Part of the placeholders. It never leaves the process, so no content can contain it.
_NONCE: Final = secrets.token_hex(8)
_PLACE: Final = re.compile(f"\ue000{_NONCE}(\\d+)\ue001")
DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
"""Names of templates, as transformers chooses by them."""
_FAULTS: Final = (
    *(jinja2.TemplateError, TypeError, ValueError),
    *(ArithmeticError, AttributeError, LookupError, RecursionError),
)
"""What a template ends with that does not fit a conversation."""
_NONE: Final[Mapping[Any, Any]] = MappingProxyType({})
_PRINTED: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
"""Bytes that byte-level vocabularies write as the character of the same number; the others as 256, 257 and so on."""
_BYTE_LEVEL: Final[Mapping[str, int]] = {
    **{chr(byte): byte for byte in _PRINTED},
    **{chr(256 + at): byte for at, byte in enumerate(sorted({*range(256)}.difference(_PRINTED)))},
}
_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of SentencePiece for one byte of a character that is not in the vocabulary."""


class ControlToken(Exception):
    """A caller's token is a control token; the arguments are its text and its id."""


class TemplateRefused(Exception):
    """The template does not take this conversation; the message is the template's own, if it has one."""


class _RaisedByTemplate(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's tokens for training; here only its body is rendered."""

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
        """``special_tokens`` are the variables such as ``bos_token``; ``now``: the local time, which templates may ask.

        Raises:
            SettingsError: a template is not valid.
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
        """The prompt up to where the assistant begins to speak; ``variables`` are the template's own.

        Messages and tools are as in transformers' chat templating: functions with their schemas, arguments as objects.

        Raises:
            TemplateRefused: the template does not take this order of roles, or fails on it.
        """
        try:
            return self._template_for(tools).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=list(tools) or None,
                documents=None,
                **{**self._special_tokens, **variables},
            )
        except _RaisedByTemplate as error:
            raise TemplateRefused(str(error)) from error
        except _FAULTS as error:
            # Its text may quote the prompt.
            line = traceback.extract_tb(error.__traceback__)[-1].lineno
            _log.info(
                "chat template failed on a conversation: %s (line %s)", type(error).__name__, line
            )
            raise TemplateRefused(
                "it fails on this order of roles, or on what they hold"
            ) from error

    def _template_for(self, tools: Sequence[Mapping[str, Any]]) -> jinja2.Template:
        named = self._templates
        found = (named.get(TOOL_USE) if tools else None) or named.get(DEFAULT)
        if found is None:
            raise TemplateRefused(
                f"the model has templates for {', '.join(named)} alone; call it with tools, or ask its operator for a "
                "template called default"
            )
        return found


def _compiled(environment: ImmutableSandboxedEnvironment, name: str, text: str) -> jinja2.Template:
    try:
        template = environment.from_string(text)
    except jinja2.TemplateError as error:
        which = "" if name == DEFAULT else f" {name}"
        raise SettingsError(f"the chat template{which} is not valid: {error}") from error
    # Each rendering copies them, and of jinja2's ChainMap name by name.
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
    """A token and where it stands in its text: its characters, and the word that it is a part of."""

    token_id: int
    start: int
    end: int
    word: tuple[int, int | None]


@dataclass(frozen=True)
class Segment:
    """A part of a text, for a model whose context is short.

    Attributes:
        token_ids: with the tokenizer's tokens around a text.
        lead: how many of those come first.
        tokens: of the text.
    """

    token_ids: list[int]
    lead: int
    tokens: Sequence[PlacedToken]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a token is.

    Attributes:
        text: of it; U+FFFD where it is not whole characters.
        data: its bytes.
    """

    text: str
    data: bytes


@dataclass
class ModelTokenizer:
    """Tokenizer, template and limits of one model."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    context_tokens: int
    """Prompt and answer together, as the model's configuration says."""
    vocab_size: int
    stop_token_ids: frozenset[int]
    """Tokens that end an answer."""
    begin_token_ids: frozenset[int] = frozenset()
    """Tokens that may stand before a text: those of its beginning, and of an end of text before it."""
    labels: tuple[str, ...] = ()
    """Of a classifier, by number."""
    tool_format: ToolFormat | None = None
    """How the model writes calls of tools; None: it does not, or its template takes no tools."""
    marks_reasoning: bool = False
    """Whether what the model thought is marked in the text of its answer, see `sluice.wire.text_tokens`."""
    pieces: PieceTokenizer | None = None
    """What encodes prompts where that is not ``tokenizer``."""
    speech: SpeechTokens | None = None
    """The control tokens of a model that takes audio. In answers they are no text, also where they are no special
    tokens, such as Whisper's timestamps."""
    token_chars_max: int = field(init=False)
    """The characters of the longest token; a longer text is more than one token."""
    _plain: "PlainTextEncoder" = field(init=False)
    _frames: dict[int, tuple[tuple[int, ...], ...]] = field(init=False, default_factory=dict)
    _texts: dict[int, str] | None = field(init=False, default=None)
    """For detokenizers; None: the text of a token depends on those before it."""
    _pieces: dict[tuple[int, bool], Piece] = field(init=False, default_factory=dict)
    _decoders: str = field(init=False)
    """The names of the decoders, among other text."""
    _neutral_id: int = field(init=False)
    """A token of text, which a decoder does not take for the beginning of a text."""

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
        """The tokens of a conversation in the chat template; without a template see `encode_text`.

        Arguments as of `ChatTemplate.render`.

        Raises:
            TemplateRefused: the template does not take this conversation.
        """
        assert self.template is not None, "callers check for a template"
        whole = self._encode(self.template.render(messages, variables, tools))
        if not tools and all(map(self._is_plain, messages)):
            return whole
        parts = self._encode_in_parts(self.template, messages, variables, tools)
        same = self._plain.control_of(whole) == self._plain.control_of(parts)
        return whole if same else parts

    def encode_text(self, text: str) -> list[int]:
        """The tokens of ``text`` without a template, with those that the tokenizer adds to every text."""
        return self.framed(self.bare(text))[0]

    def token_ends(self, text: str) -> list[int]:
        """Where each token of ``text`` ends, in characters, without those that the tokenizer adds to every text."""
        if self.pieces is not None:
            return self.pieces.ends(text)
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        # Of a token of blanks alone some tokenizers give no place.
        return list(accumulate((end for _, end in offsets), max))

    def segments(self, text: str, tokens_max: int) -> list[Segment]:
        """``text`` in segments of at most ``tokens_max`` tokens.

        Neighbours share a quarter, so that what one segment cuts is whole in the next.
        """
        first, last = self._frame(1)  # [CLS] text [SEP] in many
        room = max(1, tokens_max - len(first) - len(last))
        tokens = self._plain.place(text)
        rest = len(tokens) - room // 4 if len(tokens) > room else 1
        starts = range(0, rest, room - room // 4)
        parts = [tokens[start : start + room] for start in starts]
        return [
            Segment([*first, *(one.token_id for one in part), *last], len(first), part)
            for part in parts
        ]

    def bare(self, text: str) -> list[int]:
        """The tokens of ``text`` without those that the tokenizer adds."""
        return self._plain.encode(text) if self.pieces is None else self.pieces.encode(text)

    def framed(self, *texts: Sequence[int]) -> tuple[list[int], int]:
        """One text or two with the tokens that the tokenizer adds, and where the last one begins."""
        first, *between, last = self._frame(len(texts))
        token_ids = [*first, *texts[0]]
        for added, text in zip(between, texts[1:], strict=True):
            token_ids += [*added, *text]
        return [*token_ids, *last], len(token_ids) - len(texts[-1])

    @property
    def lead(self) -> list[int]:
        """The tokens that begin every text, such as one for its beginning."""
        return list(self._frame(1)[0])

    def added(self, texts: int) -> int:
        """How many tokens the tokenizer adds to one text or to two."""
        return sum(map(len, self._frame(texts)))

    def _frame(self, texts: int) -> tuple[tuple[int, ...], ...]:
        """What the tokenizer puts before, between and behind the texts: [CLS] text [SEP] text [SEP] in many."""
        frames = self._frames
        if texts not in frames:
            known = (text for text in ("a", *self.tokenizer.get_vocab()) if self.bare(text))
            text = next(known, "a")
            sample = self.tokenizer.encode(text, text if texts == 2 else None)
            parts: list[list[int]] = [[]]
            before = None
            for token_id, of in zip(sample.ids, sample.sequence_ids, strict=True):
                if of is None:
                    parts[-1].append(token_id)
                elif of != before:
                    parts.append([])
                before = of
            frames[texts] = tuple(map(tuple, parts))
        return frames[texts]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, a first one that begins every text left out.

        Raises:
            ControlToken: another one is a control token.
        """
        begins = token_ids and (token_ids[0] in self.begin_token_ids or token_ids[0] in self.lead)
        rest = list(token_ids[1:] if begins else token_ids)
        if control := self._plain.control_of(rest):
            raise ControlToken(self.tokenizer.id_to_token(control[0]) or "", control[0])
        return str(self.tokenizer.decode(rest, skip_special_tokens=False))

    def detokenizer(self, *, tools: bool = False, stops: Sequence[str] = ()) -> "Detokenizer":
        """Return the detokenizer of one answer.

        Special tokens that begin and end calls of ``tools``, or are one of the strings ``stops``, have their text.
        """
        marks = list(stops)
        if tools and self.tool_format is not None:
            marks += (self.tool_format.opening, self.tool_format.closing)
        shown = {
            token_id: mark for mark in marks if (token_id := self.special_id(mark)) is not None
        }
        hidden = self.speech.control if self.speech else ()
        return Detokenizer(self.tokenizer, shown, hidden, texts=self._texts)

    def special_id(self, text: str) -> int | None:
        """The special token ``text``, if there is one."""
        token_id = self.tokenizer.token_to_id(text) if text else None
        added = {} if token_id is None else self.tokenizer.get_added_tokens_decoder()
        return token_id if token_id in added and added[token_id].special else None

    def piece(self, token_id: int, is_first: bool = False) -> Piece:
        """Return what a token is: at the beginning of a text, or behind other text."""
        known = self._pieces.get((token_id, is_first))
        if known is None:
            known = self._pieces[token_id, is_first] = self._piece(token_id, is_first)
        return known

    def _piece(self, token_id: int, is_first: bool) -> Piece:
        added, name = (
            self.tokenizer.get_added_tokens_decoder(),
            self.tokenizer.id_to_token(token_id),
        )
        if token_id in added or name is None:
            text = added[token_id].content if token_id in added else ""
            return Piece(text, text.encode())
        data = self._bytes_of(name)
        if data is not None:
            return Piece(data.decode(errors="replace"), data)
        before = [] if is_first else [self._neutral_id]
        known = self.tokenizer.decode(before, skip_special_tokens=False)
        text = self.tokenizer.decode([*before, token_id], skip_special_tokens=False)[len(known) :]
        return Piece(text, text.encode())

    def _bytes_of(self, name: str) -> bytes | None:
        """Return the bytes that the vocabulary writes as ``name``; None: it writes text."""
        if "ByteLevel" in self._decoders and _BYTE_LEVEL.keys() >= set(name):
            return bytes(_BYTE_LEVEL[char] for char in name)
        if "ByteFallback" in self._decoders and (byte := _BYTE.fullmatch(name)):
            return bytes.fromhex(byte[1])
        return None

    def _encode(self, text: str) -> list[int]:
        # Without the places of the tokens in the text, which nobody asks for, in four fifths of the time.
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _is_plain(self, message: Mapping[str, Any]) -> bool:
        return "tool_calls" not in message and self._plain.has_no_control(message["content"] or "")

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
            if index % 2 == 0:
                token_ids += self._encode(piece)
                continue
            text, in_json = hidden[int(piece)], int(piece) >= contents
            if in_json and pieces[index - 1].endswith('"'):
                text = json.dumps(text, ensure_ascii=False)[1:-1]
            token_ids += self._plain.encode(text)
        return token_ids


class Detokenizer:
    """Text of a growing list of tokens; special and ``hidden`` tokens have none, but ``shown`` ones.

    A byte-level tokenizer may split one character over several tokens; until it is whole the decoder shows U+FFFD at
    the end, and the text is held back (tokenizers' ``DecodeStream`` does the book-keeping).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        shown: Mapping[int, str] = _NONE,
        hidden: Collection[int] = (),
        texts: dict[int, str] | None = None,
    ) -> None:
        """``texts``: of tokens that are whole characters, for all answers of a byte-level tokenizer."""
        self._tokenizer = tokenizer
        self._special = shown
        self._hidden = hidden
        self._texts = texts
        self._stream = DecodeStream(skip_special_tokens=True)
        # Tokens of the last piece of text, and those since: enough to decode what is held back in its context.
        self._shown: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; may be empty."""
        # Bytes of whole characters depend on nothing before them, so the stream may miss them.
        if self._texts is not None and not self._held and token_id in self._texts:
            return self._texts[token_id]
        if token_id in self._special:
            before, self._shown = self.flush(), []
            self._stream = DecodeStream(skip_special_tokens=True)
            return before + self._special[token_id]
        if token_id in self._hidden:
            return ""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # "Invalid prefix": some decoders change earlier text in hindsight. The held tokens are decoded
            # as they stand.
            text = self._held_text()
            self._stream = DecodeStream(skip_special_tokens=True)
        if text is None:
            return ""
        if self._texts is not None and len(self._held) == 1:
            self._texts[token_id] = text
        self._shown, self._held = self._held, []
        return text

    def flush(self) -> str:
        """What was held back, when no more tokens come; U+FFFD stands for bytes that are no character."""
        text = self._held_text()
        self._shown, self._held = self._held, []
        return text

    def _held_text(self) -> str:
        shown = self._tokenizer.decode(self._shown, skip_special_tokens=True)
        both = self._tokenizer.decode(self._shown + self._held, skip_special_tokens=True)
        return both[len(shown) :]


class PlainTextEncoder:
    """Encodes a caller's text so that it never holds a control token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        serialized = json.loads(tokenizer.to_str())
        # The token for unknown characters controls nothing.
        unknown = _unknown_of(serialized["model"])
        self._control = dict[int, str]()
        for token in serialized["added_tokens"]:
            if token["special"] or _is_mark(token["content"]):
                token["special"] = True
                if token["content"] != unknown:
                    self._control[token["id"]] = token["content"]
        self._tokenizer = Tokenizer.from_str(json.dumps(serialized))
        # tokenizers' switch for "treat special tokens as text".
        self._tokenizer.encode_special_tokens = True
        edges = {char for token in self._control.values() for char in (token[0], token[-1])}
        self._edges = re.compile(f"[{re.escape(''.join(edges))}]" if edges else "(?!)", re.I)
        self._control_chars_max = max(map(len, self._control.values()), default=0)
        self._firsts = {content[0] for content in self._control.values()}

    def may_hold_control(self, text: str) -> bool:
        """Whether ``text`` may hold the text of a control token; quick."""
        return not self._firsts.isdisjoint(text)

    def has_no_control(self, text: str) -> bool:
        """Whether ``text`` has no part in a control token, whatever a template writes around it.

        A token that begins or ends in the text has its first or last character there; else all of the text is inside
        it. Only ASCII: other characters may be normalized to these.
        """
        if not text.isascii() or self._edges.search(text) is not None:
            return False
        bare = text.strip()
        return len(bare) >= self._control_chars_max or not any(
            bare in token for token in self._control.values()
        )

    def control_of(self, token_ids: Sequence[int]) -> list[int]:
        """The control tokens among ``token_ids``, in order."""
        return [token_id for token_id in token_ids if token_id in self._control]

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``, without those that the tokenizer adds to every text."""
        token_ids = list(self._bare(text).ids)
        if self.control_of(token_ids):
            return [one.token_id for one in self.place(text)]
        return token_ids

    def place(self, text: str) -> list[PlacedToken]:
        """The tokens of ``text`` with their places in it."""
        whole = self._bare(text)
        if not self.control_of(whole.ids):
            return list(self._placed(text, whole, 0))
        placed: list[PlacedToken] = []
        begin = 0
        for piece in self._cut(text):
            placed += self._placed(text, self._bare(piece), begin)
            begin += len(piece)
        return [one for one in placed if one.token_id not in self._control]

    def _placed(self, text: str, found: Encoding, begin: int) -> Iterator[PlacedToken]:
        """The tokens of a piece of ``text`` that begins at ``begin``."""
        # Without a pre-tokenizer all is one word.
        words = found.word_ids if self._tokenizer.pre_tokenizer else range(len(found.ids))
        for token_id, (start, end), word in zip(found.ids, found.offsets, words, strict=True):
            blanks = end - start - len(text[begin + start : begin + end].lstrip())
            yield PlacedToken(token_id, begin + start + blanks, begin + end, (begin, word))

    def _bare(self, text: str) -> Encoding:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _cut(self, text: str) -> list[str]:
        """Some vocabularies (unigram) hold control tokens as words: splits them after their first character."""
        control = sorted(self._control.values(), key=len, reverse=True)
        pattern = "|".join(f"(?<={re.escape(c[0])})(?={re.escape(c[1:])})" for c in control)
        return re.split(pattern, text)


def _unknown_of(model: Mapping[str, Any]) -> str | None:
    """The token of a vocabulary for characters that are not in it; None: there is none. Unigram models number it."""
    number = model.get("unk_id")
    return model.get("unk_token") if number is None else str(model["vocab"][number][0])


def _is_mark(content: str) -> bool:
    """Whether it is one such as ``<think>``, which some models keep among ordinary added tokens."""
    return len(content) > 2 and (content[0], content[-1]) in {("<", ">"), ("[", "]")}
