"""Tokenizers of Marian models as the hub has them, without a tokenizer.json.

    source.spm     a model of SentencePiece: the pieces of the prompt's language, and how text is normalized
    vocab.json     the numbers of the pieces of both languages, of special tokens, of ">>fra<<" in multilingual models

A prompt is cut into pieces by the first. Each has the number that the second gives to its text, also where
SentencePiece does not know it. Answers are pieces of either language.

Numbers are those of transformers' MarianTokenizer.
"""

from collections.abc import Mapping
from typing import Final

from tokenizers import Tokenizer, decoders, models, processors

_SPECIAL: Final = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class PieceTokenizer:
    """What cuts prompts into pieces, and their numbers."""

    def __init__(self, source: bytes, ids: Mapping[str, int], unknown: int) -> None:
        """A tokenizer of prompts by source.spm.

        Args:
            source: of source.spm.
            ids: of pieces; special tokens are none.
            unknown: the number of a piece that has none.

        Raises:
            ValueError: ``source`` is no model of SentencePiece.
        """
        # Imported here: a gateway without Marian models does not need it.
        from sentencepiece import SentencePieceProcessor

        self._pieces = SentencePieceProcessor()
        try:
            self._pieces.LoadFromSerializedProto(source)
        except RuntimeError as error:
            raise ValueError("source.spm is no model of SentencePiece; copy it again") from error
        self._ids, self._unknown = ids, unknown

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``, which may begin with the language to translate into: ``>>fra<< text``."""
        end = text.find("<<") + 2 if text.startswith(">>") else 0
        code = [text[:end]] if end > 2 else []
        found = [*code, *self._pieces.encode(text[end:] if code else text, return_type=str)]
        return [self._ids.get(piece, self._unknown) for piece in found]

    def ends(self, text: str) -> list[int]:
        """Where each piece of ``text`` ends, in characters."""
        return [
            end for _, end in self._pieces.encode(text, return_type="offset_mapping")["offsets"]
        ]


def marian_tokenizers(
    source: bytes, vocabulary: Mapping[str, int], named: Mapping[str, str]
) -> tuple[Tokenizer, PieceTokenizer]:
    """The tokenizer of answers, and that of prompts.

    Args:
        source: of source.spm.
        vocabulary: of vocab.json.
        named: the special tokens that tokenizer_config.json names.

    Raises:
        ValueError: what is not as it should be.
    """
    special = [named.get(name, token) for name, token in _SPECIAL.items()]
    absent = [token for token in special if token not in vocabulary]
    if absent:
        raise ValueError(f"vocab.json lacks {', '.join(absent)}")
    end, unknown = special[0], special[1]
    answers = Tokenizer(models.WordLevel(dict(vocabulary), unk_token=unknown))
    answers.add_special_tokens(special)
    answers.decoder = decoders.Metaspace(replacement="▁")
    ends = [(end, vocabulary[end])]
    answers.post_processor = processors.TemplateProcessing(f"$A {end}", f"$A $B {end}", ends)
    ids = {piece: number for piece, number in vocabulary.items() if piece not in special}
    return answers, PieceTokenizer(source, ids, vocabulary[unknown])
