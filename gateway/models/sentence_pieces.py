"""Tokenizers of Marian models as the hub has them, without a tokenizer.json.

    source.spm     a model of SentencePiece: the pieces of the prompt's language, and how text is normalized
    vocab.json     the numbers of the pieces of both languages, of special tokens, of ">>fra<<" in multilingual models

A prompt is cut into pieces by the first. Each has the number that the second gives to its text, also where
SentencePiece does not know it. Answers are pieces of either language.

Numbers are those of transformers' MarianTokenizer, which needs the library sentencepiece, but for one thing: a
combining mark behind a compatibility character (a full-width digit with an accent) may be lost, as in all tokenizers of
the library tokenizers that have SentencePiece's rules of normalization.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors

# sentencepiece_model.proto of SentencePiece: ModelProto, ModelProto.SentencePiece, TrainerSpec, NormalizerSpec.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_ALGORITHM: Final = 3
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_BLANKS = 2, 3, 4
_UNIGRAM: Final = 1
_NORMAL, _USER_DEFINED = 1, 4
_SPACE: Final = "▁"


@dataclass(frozen=True)
class PieceTokenizer:
    """What cuts prompts into pieces, and their numbers.

    Attributes:
        ids: of pieces; special tokens are none.
        unknown: the number of a piece that has none.
    """

    pieces: Tokenizer
    ids: Mapping[str, int]
    unknown: int

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``, which may begin with the language to translate into: ``>>fra<< text``."""
        end = text.find("<<") + 2 if text.startswith(">>") else 0
        code = [text[:end]] if end > 2 else []
        found = [*code, *self.pieces.encode(text[end:] if code else text).tokens]
        return [self.ids.get(piece, self.unknown) for piece in found]


def marian_tokenizers(
    source: bytes, vocabulary: Mapping[str, int], config: Mapping[str, Any]
) -> tuple[Tokenizer, PieceTokenizer]:
    """The tokenizer of answers, and that of prompts.

    Args:
        source: of source.spm.
        vocabulary: of vocab.json.
        config: of tokenizer_config.json.

    Raises:
        ValueError: what is not as it should be, or not served.
    """
    if config.get("separate_vocabs"):
        raise ValueError("separate_vocabs: a vocabulary for each language is not served")
    special = [_content(config.get(f"{name}_token")) or token for name, token in _SPECIAL.items()]
    absent = [token for token in special if token not in vocabulary]
    if absent:
        raise ValueError(f"vocab.json lacks {', '.join(absent)}")
    end, unknown = special[0], special[1]
    answers = Tokenizer(models.WordLevel(dict(vocabulary), unk_token=unknown))
    answers.add_special_tokens(special)
    answers.decoder = decoders.Metaspace(replacement=_SPACE)
    ends = [(end, vocabulary[end])]
    answers.post_processor = processors.TemplateProcessing(f"$A {end}", f"$A $B {end}", ends)
    ids = {piece: number for piece, number in vocabulary.items() if piece not in special}
    return answers, PieceTokenizer(_pieces(source), ids, vocabulary[unknown])


_SPECIAL: Final = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}


def _content(token: Any) -> str | None:
    """Tokens are strings, or objects of an AddedToken."""
    return token.get("content") if isinstance(token, Mapping) else token


def _pieces(source: bytes) -> Tokenizer:
    """SentencePiece's own: the text is one sequence, in which blanks are pieces too."""
    known, about = [("<unk>", 0.0)], {_TRAINER: b"", _NORMALIZER: b""}
    for number, value in _fields(source):
        if number == _PIECE:
            piece = dict(_fields(value))
            if piece.get(_KIND, _NORMAL) in (_NORMAL, _USER_DEFINED):
                score = struct.unpack("<f", struct.pack("<I", piece.get(_SCORE, 0)))[0]
                known.append((piece[_TEXT].decode(), score))
        elif number in about:
            about[number] = value
    if dict(_fields(about[_TRAINER])).get(_ALGORITHM, _UNIGRAM) != _UNIGRAM or len(known) == 1:
        raise ValueError("source.spm is no Unigram model, which alone is served")
    tokenizer = Tokenizer(models.Unigram(known, unk_id=0))
    tokenizer.normalizer = normalizers.Sequence(list(_normalizers(about[_NORMALIZER])))
    return tokenizer


def _normalizers(spec: bytes) -> Iterator[normalizers.Normalizer]:
    rules = dict(_fields(spec))
    if rules.get(_CHARSMAP):
        yield normalizers.Precompiled(rules[_CHARSMAP])
    if rules.get(_REMOVE_BLANKS, True):
        yield normalizers.Replace(Regex(" +"), " ")
        yield normalizers.Replace(Regex(r"\A "), "")
        yield normalizers.Replace(Regex(rf"[ {_SPACE}]+\z"), "")
    if rules.get(_DUMMY_PREFIX, True):
        yield normalizers.Prepend(_SPACE)
    yield normalizers.Replace(" ", _SPACE)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and values of a message's fields."""
    read = Empty()
    try:
        read.ParseFromString(message)
    except DecodeError as error:
        raise ValueError("source.spm is no model of SentencePiece; copy it again") from error
    fields = UnknownFieldSet(read)
    for field in map(fields.__getitem__, range(len(fields))):
        yield field.field_number, field.data
