"""Small random Whisper models that hear 2 s at a time, in memory and as folders."""

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHUNK_S: Final = 2
WORDS: Final = 80
POSITIONS: Final = 48
"""Of the decoder."""
END: Final = WORDS
START: Final = WORDS + 1
LANGUAGES: Final = {"<|en|>": WORDS + 2, "<|de|>": WORDS + 3, "<|fr|>": WORDS + 4}
TASKS: Final = {"translate": WORDS + 5, "transcribe": WORDS + 6}
PREVIOUS: Final = WORDS + 7
NO_TIMESTAMPS: Final = WORDS + 8
VOCABULARY: Final = WORDS + 9
GENERATION: Final[dict[str, Any]] = {
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "pad_token_id": END,
    "bos_token_id": END,
    "lang_to_id": LANGUAGES,
    "task_to_id": TASKS,
    "is_multilingual": True,
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "prev_sot_token_id": PREVIOUS,
    "suppress_tokens": [7, *TASKS.values(), PREVIOUS, START, NO_TIMESTAMPS],
    "begin_suppress_tokens": [3, END],
    "max_length": POSITIONS,
    "return_timestamps": False,
}


def tiny_whisper(seed: int = 0, chunk_s: int = CHUNK_S, **generation: Any) -> Any:
    """The model, which hears ``chunk_s`` at a time; the same seed gives the same weights."""
    # Imported here: a gateway reads its folder without them.
    import torch
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4, num_mel_bins=16,
        max_source_positions=50 * chunk_s, max_target_positions=POSITIONS, init_std=0.6,
        decoder_start_token_id=START, eos_token_id=END, pad_token_id=END, bos_token_id=END,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    model.generation_config = GenerationConfig(**{**GENERATION, **generation})
    return model


def extractor(chunk_s: int = CHUNK_S) -> Any:
    """Its feature extractor."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=16, chunk_length=chunk_s)


def save_whisper(folder: Path, seed: int = 0, chunk_s: int = CHUNK_S, **generation: Any) -> Path:
    """Writes it to ``folder`` in Hugging Face layout, with a tokenizer of words " w0", " w1" and so on."""
    save_whisper_files(folder)
    tiny_whisper(seed, chunk_s, **generation).save_pretrained(folder)
    extractor(chunk_s).save_pretrained(folder)
    return folder


def save_whisper_files(folder: Path, chunk_s: int = CHUNK_S, times: int = 0) -> Path:
    """What a gateway reads of it; ``times``: how many timestamps its vocabulary has, which are no special tokens."""
    config = {
        "model_type": "whisper", "is_encoder_decoder": True, "vocab_size": VOCABULARY + times,
        "max_source_positions": 50 * chunk_s, "max_target_positions": POSITIONS,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    words = {f" w{number}": number for number in range(WORDS)} | {"<|endoftext|>": END}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=" w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.decoder = decoders.Fuse()
    named = {f"<|{name}|>": number for name, number in TASKS.items()}
    named |= {"<|startoftranscript|>": START, "<|startofprev|>": PREVIOUS}
    named |= {"<|notimestamps|>": NO_TIMESTAMPS, "<|endoftext|>": END, **LANGUAGES}
    tokenizer.add_special_tokens(sorted(named, key=lambda name: named[name]))
    assert all(tokenizer.token_to_id(name) == number for name, number in named.items())
    tokenizer.add_tokens([f"<|{number / 50:.2f}|>" for number in range(times)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder
