"""A tiny Marian model as the hub has it, and the pieces that transformers' MarianTokenizer finds in texts."""

import base64
import json
import zlib
from pathlib import Path
from typing import Any, Final

SOURCE: Final = zlib.decompress(
    base64.b64decode(
        "eNpN1AlYFGUcx/F3FxB4XTGR10g7eLS0NCHoLtJuswxJLiMQx93Z2NhDdmaF7iUrKbUyycqyNLssrawsyIot6ba0"
        "oqzsMKCH6skuO9Q0+w7jkDz74f3933nfl5l530VmyJTCWLhughL8ZLulRyYVGvurJDlIJhfmHVgO6FrSZNbqqm3r"
        "yIQcKJMpNTW5fUpCHiTTKUJatE431dJ5UxP7R0eCPtW7nTJDplI2aNGQ6plenJCDZRq1XwsGDVWZOs3paIhEfYZa"
        "10WHR6ZYHbrqLSpx5pu6YaqO4hJneS3M8u0lzuxoRGN254pSp8MI8QfUNqvDXi5gqPfWljrTvZqpqoeUObdvaIGg"
        "7lNFWWUH3A4PsCtU7nTU6sFgRLV2lTtLGCzR3l3urB/xqzGlFf1VWO3w9leMHLulwnkUn9YQVgXjK52FQlxeNqrK"
        "KU1dUzNHVzujo1ogrOJrZiRkphxIXR/jTQRYv3J9TUKmSVdM9ez09qV61bzbTl41bo+d6tSmvXbyq+g+O9Uq5fL1"
        "pZBqc9spoKqS7RRWYoCdGtTKVDtF1aR0O/nUj9JOEbXQYydd5WfYKag6B9vJUI1D7GSqEUPtpKn2LJKUSTyHmjXM"
        "17+5teyOVWfmy6F5Zmh2Hucpz4jEol4912w0MzP+77T2NduVk18mRHxis1sMb02TnpihR2t8uj8Q1n2Zi9NEMuc2"
        "R4j0dCFkihAuxm70uMWgQ4RoovZQLx/Prxy3mJ9iHXJq2iTaeLJbxPPtcUyPz6XlE1+kC5HFwIMxDIs2u0U27QgM"
        "x2E4FEfgcKzucFu3IEZhJI7CkRiD0TgGR2McxoLbEcciD7l4udMtjqM9HgU4ESfgZJyEU3EKTsdpOAOFmIgJOAtn"
        "4hycjfNwLibhfEzGBbgIF+JiTMFUFOESFKME08D7FqWoQDkuxXRchkpUowo1mAENM+HFLPD6hA+Xw48AalGHKxCy"
        "xrS4RYQ2jHrMhoEoYjDRgDm4Eo24GlfhWlyD63EdmqxNxVzcgJtwI+bhZtyCZszHrViIBbgdt1n7izuwGHfiLrTg"
        "bizBvbgH92EpluF+PIgHsALLsRIP4RE8jMfwKFbhcTyJJ7DGOjN4Gk9hLZ7Bc3gW6/A8XsQLaEMr1uMlvGKdGbTj"
        "VbyGBDbgdbyBDryFN/EO3rauNbvEu7TvYyM24QN8iM34GB/hE3RiCz7F5/gMW/EFvsKX+AZf41tsQze68B160Itf"
        "VrvED7TfW9cWuER3i0tsJ/9kXcPP+A2/Ygd+x5/4A3/jL+zCTvyD3diLPdiHf0Xf9z9f+P0BwWfDKlGQ2f8vJBoL"
        "6kauacz5D6mmiLI="
    )
)
"""A source.spm of SentencePiece 0.2.3, trained on a few English words, with rules of its own for blanks and accents."""
_PIECES: Final = (
    "</s> <unk> >>deu<< >>fra<< ▁the ▁a ▁market ▁old ▁warm ▁words ▁we ▁test ▁and ▁roads ▁small "
    "▁is ▁cat ▁sailed ▁world ▁hello ▁sat ▁of ▁on ▁at ▁dawn ▁mat ▁tea ▁rain ▁question u q c k f h "
    "m i n w r d o e l s t a ▁ ▁this ▁die ▁katze ▁saß ▁über ß ö ü ä 中 中文 ▁größe 👩 <pad>"
)
PIECES: Final = _PIECES.split()
FOUND: Final[dict[str, list[str]]] = {
    text: pieces.split()
    for text, pieces in (
        ("hello world", "▁hello ▁world"),
        ("héllo wörld", "▁ h <unk> l l o ▁ w ö r l d"),
        ("Straße, naïve café", "▁ <unk> t r a ß e <unk> ▁ n a <unk> e ▁ c a f <unk>"),
        ("中文", "▁ 中文"),
        ("東京タワー hello", "▁ <unk> ▁hello"),
        ("مرحبا بالعالم", "▁ <unk> ▁ <unk>"),
        ("हिन्दी भाषा", "▁ <unk> ▁ <unk>"),
        ("ไทย", "▁ <unk>"),
        ("한국어 hello", "▁ <unk> ▁hello"),
        ("😀", "▁ <unk>"),
        ("hello \U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 world \U0001f3f3\ufe0f\u200d\U0001f308",
         "▁hello ▁ <unk> ▁world ▁ <unk>"),
        ("ẹ́ å", "▁ <unk> ▁a <unk>"),
        ("́", "▁ <unk>"),
        ("ﬁne ①②", "▁ f i n e ▁ <unk>"),
        ("x\u200by\xada", "▁ <unk> a"),
        ("\u202eabc", "▁ <unk> a <unk> c"),
        ("a\tb\nc\r\n", "▁a ▁ <unk> ▁ c"),
        ("  two  blanks  ", "▁ t w o ▁ <unk> l a n k s"),
        ("", ""),
        (" ", ""),
        ("\n\t ", ""),
        ("\u3000", ""),
        ("\ufeff", "▁ <unk>"),
        ("hello中中中中中中中中中中中中中中中中中中中中", "▁hello <unk>"),
        ("Ω≈ç√∫ the cat", "▁ <unk> ▁the ▁cat"),
        ("the cat sat on the mat", "▁the ▁cat ▁sat ▁on ▁the ▁mat"),
        (">>fra<< hello", ">>fra<< ▁hello"),
        (">>deu<<hello world", ">>deu<< ▁hello ▁world"),
        (">>xyz<< hello", "<unk> ▁hello"),
        ("a >>fra<< b", "▁a ▁ <unk> f r a <unk> ▁ <unk>"),
        (">> a", "▁ <unk> ▁a"),
        ("▁▁hello▁", "▁ ▁ ▁hello"),
        ("über 中文 größe", "▁ <unk> e r ▁ 中文 ▁ <unk> r <unk> e"),
        ("rain falls", "▁rain <unk>"),
        ("中文字", "▁ <unk>"),
        ("die katze saß", "▁ d i e ▁ k a t <unk> e ▁ s a ß"),
    )
}  # fmt: skip
"""By transformers 5.23 and SentencePiece 0.2.3, without the end."""
VOCABULARY: Final = {piece: number for number, piece in enumerate(PIECES)}


def save_marian_files(folder: Path, **config: Any) -> Path:
    """The tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "source.spm").write_bytes(SOURCE)
    (folder / "target.spm").write_bytes(SOURCE)
    (folder / "vocab.json").write_text(json.dumps(VOCABULARY))
    about = {"source_lang": "en", "target_lang": "de", "tokenizer_class": "MarianTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, **config}))
    return folder


def save_marian(folder: Path) -> Any:
    """All of it; returns the model."""
    # Imported here: a gateway reads its folder without them.
    from tests.support.tiny_seq2seq import tiny_seq2seq

    end, pad = VOCABULARY["</s>"], VOCABULARY["<pad>"]
    tokens = {"decoder_start_token_id": pad, "pad_token_id": pad, "eos_token_id": end}
    model = tiny_seq2seq("marian", vocab_size=len(PIECES), **tokens)
    model.generation_config.bad_words_ids = [[pad]]
    model.save_pretrained(save_marian_files(folder))
    return model
