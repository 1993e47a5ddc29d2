"""Encoder-decoders without the mesh against transformers' `generate`, on a T5 and a Whisper of random weights.

    python bench/seq2seq.py [--json] [--runs N] [--only FIGURE] [--clips N]

- `seq2seq_vs_generate`: tokens/s of answers. Work of a round: `TEXTS` texts whose lengths are lognormal (median
  `TEXT_MEDIAN` tokens, sigma `SIGMA`, at most `TOKENS_MAX`) and answers of as many tokens as a second draw
  says (median `ANSWER_MEDIAN`), greedy, without stop tokens; the seed is the number of the round. Ours: the engine
  with `ROWS` slots, all texts at once. Peer: `generate` on batches of `ROWS` texts, sorted by length and padded, each
  as long as its longest answer; of every answer the tokens asked for count. Both in float32, with one thread, one
  after the other in this process.
- `whisper_vs_generate`: seconds of audio a second, with the sizes of whisper-tiny. Work of a round: `CLIPS` clips of
  30 s of noise with answers as above, of at most `WORDS_MAX` tokens, `SPEECH_ROWS` rows. Both sides make the features
  of the clips too; the peer's static batches are in the order of the clips, since all are equally long.
"""

import argparse
import asyncio
import math
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import (
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import MIN_RUNS, Figure, compare, emit, run_count
from model_workers.engine.encoder_decoder import EncoderDecoder, EncoderDecoderEngine
from model_workers.engine.protocol import AudioSpec, RowSpec, Sampling
from model_workers.engine.rows import RowLimits
from model_workers.engine.sampling.sampler import Sampler
from model_workers.engine.speech import SAMPLES_A_SECOND, SpeechModel
from sluice.settings.models import SideLimits

TEXTS: Final = 128
ROWS: Final = 32
TEXT_MEDIAN: Final = 64
ANSWER_MEDIAN: Final = 24
SIGMA: Final = 0.8
TOKENS_MAX: Final = 256
MODEL: Final[dict[str, Any]] = {
    "vocab_size": 8192, "d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

CLIPS: Final = 24
CLIP_S: Final = 30
SPEECH_ROWS: Final = 8
WORDS_MAX: Final = 192
WHISPER: Final[dict[str, Any]] = {
    "vocab_size": 51865, "d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "num_mel_bins": 80,
    "encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip

Work = Sequence[tuple[list[int], int]]
"""Texts, and tokens of their answers."""
Clips = Sequence[tuple[bytes, int]]
"""Sounds, and tokens of their answers."""


def work_of(seed: int) -> Work:
    """The texts of a round."""
    draw = random.Random(seed)

    def length(median: int) -> int:
        return min(TOKENS_MAX, max(1, round(draw.lognormvariate(math.log(median), SIGMA))))

    return [
        (
            [draw.randrange(2, MODEL["vocab_size"]) for _ in range(length(TEXT_MEDIAN))],
            length(ANSWER_MEDIAN),
        )
        for _ in range(TEXTS)
    ]


def ours(model: Any, work: Work) -> None:
    """All of ``work`` through the engine."""
    sides = SideLimits(TOKENS_MAX, TOKENS_MAX, 2 * TOKENS_MAX)
    limits = RowLimits(ROWS, TEXTS, sides.context, ROWS * TOKENS_MAX)
    engine = EncoderDecoderEngine(EncoderDecoder(model), Sampler(), limits, sides)
    for number, (text, tokens) in enumerate(work):
        engine.add(RowSpec(str(number), "bench", 0, tuple(text), (), Sampling(tokens)), 0.0)
    while engine.has_rows():
        engine.step(0.0)


@torch.inference_mode()
def peer(model: Any, work: Work) -> None:
    """The same through `generate`."""
    ordered = sorted(work, key=lambda one: len(one[0]))
    for start in range(0, len(ordered), ROWS):
        batch = ordered[start : start + ROWS]
        width = max(len(text) for text, _ in batch)
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for place, (text, _) in enumerate(batch):
            ids[place, : len(text)] = torch.tensor(text)
            mask[place, : len(text)] = 1
        longest = max(tokens for _, tokens in batch)
        model.generate(
            ids,
            attention_mask=mask,
            min_new_tokens=longest,
            max_new_tokens=longest,
            do_sample=False,
            num_beams=1,
        )


async def seq2seq_vs_generate(runs: int) -> Figure:
    """The figure above."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**MODEL)).eval()
    rounds = {ours: count(), peer: count()}

    async def rate(side: Any) -> float:
        work = work_of(next(rounds[side]))
        start = time.perf_counter()
        side(model, work)
        return sum(tokens for _, tokens in work) / (time.perf_counter() - start)

    return await compare(
        "seq2seq_vs_generate",
        lambda: rate(ours),
        lambda: rate(peer),
        unit="tokens/s",
        higher_is_better=True,
        note=f"T5 of {model.num_parameters() / 1e6:.0f} M, {TEXTS} texts, {ROWS} rows; peer: static batches",
        runs=runs,
        settings={"texts": TEXTS, "rows": ROWS, "sigma": SIGMA},
    )


def clips_of(seed: int, clips: int) -> Clips:
    """The sounds of a round."""
    draw = random.Random(seed)
    answers = (draw.lognormvariate(math.log(ANSWER_MEDIAN), SIGMA) for _ in range(clips))
    return [
        (draw.randbytes(2 * CLIP_S * SAMPLES_A_SECOND), min(WORDS_MAX, max(1, round(tokens))))
        for tokens in answers
    ]


def ours_speech(model: SpeechModel, clips: Clips) -> None:
    """All of ``clips`` through the engine."""
    config = WhisperConfig(**WHISPER)
    start, positions = config.decoder_start_token_id, config.max_target_positions
    sides = SideLimits(positions - 1, positions, positions)
    limits = RowLimits(SPEECH_ROWS, len(clips), positions, positions)
    engine = EncoderDecoderEngine(model, Sampler(), limits, sides)
    for number, (pcm, tokens) in enumerate(clips):
        spec = RowSpec(
            str(number), "bench", 0, (start,), (), Sampling(tokens), audio=AudioSpec(pcm)
        )
        engine.add(spec, 0.0)
    while engine.has_rows():
        engine.step(0.0)


@torch.inference_mode()
def peer_speech(model: Any, extractor: Any, clips: Clips) -> None:
    """The same through `generate`."""
    for start in range(0, len(clips), SPEECH_ROWS):
        batch = clips[start : start + SPEECH_ROWS]
        waves = [np.frombuffer(pcm, "<i2").astype(np.float32) / 32_768 for pcm, _ in batch]
        heard = extractor(waves, sampling_rate=SAMPLES_A_SECOND, return_tensors="pt")
        longest = max(tokens for _, tokens in batch)
        model.generate(
            heard.input_features,
            min_new_tokens=longest,
            max_new_tokens=longest,
            do_sample=False,
            num_beams=1,
        )


async def whisper_vs_generate(runs: int, clips: int) -> Figure:
    """The figure above."""
    torch.manual_seed(0)
    extractor: Any = WhisperFeatureExtractor()  # type: ignore[no-untyped-call]
    hearing = SpeechModel(_whisper(), extractor)
    sides = {
        "ours": partial(ours_speech, hearing),
        "peer": partial(peer_speech, _whisper(), extractor),
    }
    rounds = {side: count() for side in sides}

    async def rate(side: str) -> float:
        work = clips_of(next(rounds[side]), clips)
        start = time.perf_counter()
        sides[side](work)
        return CLIP_S * clips / (time.perf_counter() - start)

    return await compare(
        "whisper_vs_generate",
        lambda: rate("ours"),
        lambda: rate("peer"),
        unit="s of audio/s",
        higher_is_better=True,
        note=f"whisper-tiny's sizes, {clips} clips of {CLIP_S} s, {SPEECH_ROWS} rows; peer: static batches",
        runs=runs,
        settings={"clips": clips, "rows": SPEECH_ROWS, "sigma": SIGMA},
    )


def _whisper() -> Any:
    model = WhisperForConditionalGeneration(WhisperConfig(**WHISPER)).eval()
    model.generation_config.max_length = model.config.max_target_positions
    return model


async def main(args: argparse.Namespace) -> None:
    """Measures the figures and prints them."""
    torch.set_num_threads(1)
    figures = []
    if args.only != "whisper_vs_generate":
        figures.append(await seq2seq_vs_generate(args.runs))
    if args.only != "seq2seq_vs_generate":
        figures.append(await whisper_vs_generate(args.runs, args.clips))
    emit(figures, args.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=run_count, default=MIN_RUNS)
    parser.add_argument("--only", choices=("seq2seq_vs_generate", "whisper_vs_generate"))
    parser.add_argument("--clips", type=int, default=CLIPS)
    asyncio.run(main(parser.parse_args()))
