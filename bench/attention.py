"""Compares implementations of attention over a paged KV cache on a CPU: microseconds of one layer of one step.

    python bench/attention.py [--rows N] [--threads N] [--cpu-time]

The figures behind docs/internals/decisions/paged-attention-cpu.md: rows of 60 to 190 tokens in shuffled blocks, 8
heads, 4 KV heads, head size 64. Every way is run in turn, 30 times; the table shows the fastest run. `--cpu-time`
counts the processor's time instead of the clock's: for a machine that is shared (only with one thread).
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))

from model_workers.engine.forward.attention import PagedDecodeAttention, VisibleBlocks
from model_workers.engine.forward.kv_cache import KvCache, LayerShape
from model_workers.engine.forward.packing import PackedChunk

SHAPE = LayerShape(heads=8, kv_heads=4, key_size=64, value_size=64)
GROUP = SHAPE.heads // SHAPE.kv_heads
RUNS = 30

Ways = dict[str, Callable[[], Tensor]]


def ways(rows: int, block_tokens: int, dtype: torch.dtype) -> Ways:
    """Every way on the same cache."""
    numbers = random.Random(1)
    lengths = [numbers.randint(60, 190) for _ in range(rows)]
    counts = [-(-length // block_tokens) for length in lengths]
    size = 2 * sum(counts)
    where = torch.device("cpu")
    pages = KvCache([SHAPE], num_blocks=size, block_tokens=block_tokens, dtype=dtype, device=where)
    keys, values = (page.normal_() for page in pages.of(0))
    free = numbers.sample(range(size), size)
    spans = [
        PackedChunk(row, 1, length - 1, [free.pop() for _ in range(count)])
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
    ]
    visible = VisibleBlocks(spans, None, pages)
    decode = PagedDecodeAttention(visible, SHAPE, pages)
    query = torch.randn(rows, SHAPE.heads, SHAPE.key_size).to(dtype)
    table = torch.zeros(rows, visible.blocks_max, dtype=torch.long)
    for span in spans:
        table[span.first, : len(span.blocks)] = torch.tensor(span.blocks)

    def gathered() -> tuple[Tensor, Tensor]:
        key = keys[table].permute(0, 2, 3, 1, 4).flatten(3)
        value = values[table].permute(0, 2, 1, 3, 4).flatten(2, 3)
        return key, value

    def products(key: Tensor, value: Tensor) -> Tensor:
        asked = query.view(rows, SHAPE.kv_heads, GROUP, -1)
        scores = torch.matmul(asked, key) + visible.hidden[:, None]
        return torch.matmul(torch.softmax(scores, -1), value)

    def fused() -> Tensor:
        key, value = gathered()
        asked, mask = query[:, :, None], visible.hidden[:, None]
        return functional.scaled_dot_product_attention(
            asked, key.transpose(2, 3), value, mask, scale=1.0, enable_gqa=True
        )

    held = gathered()
    asked = query.view(rows, SHAPE.kv_heads, GROUP, -1)[[s.first for s in spans for _ in s.blocks]]
    used = sum(counts)
    block_keys = keys[:used].flatten(0, 1)
    shares = torch.rand(used * SHAPE.kv_heads, GROUP, block_tokens).to(dtype)

    def by_block() -> Tensor:
        torch.bmm(asked.flatten(0, 1), block_keys)
        return torch.bmm(shares, values[:used].flatten(0, 1))

    return {
        "paged": lambda: decode.attend(query, (keys, values), visible.hidden),
        "gather, two products": lambda: products(*gathered()),
        "gather, SDPA with a mask": fused,
        "two products block by block, without merging": by_block,
        "two products, nothing to gather": lambda: products(*held),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    print(f"{'numbers':<10}{'block':>6}  {'us':>7}  way")
    for dtype in (torch.bfloat16, torch.float32):
        for block_tokens in (16, 32, 64):
            with torch.inference_mode():
                all_ways = ways(args.rows, block_tokens, dtype)
                fastest = dict.fromkeys(all_ways, float("inf"))
                for _ in range(RUNS):
                    for name, run in all_ways.items():
                        began = clock()
                        run()
                        fastest[name] = min(fastest[name], clock() - began)
            for name, took_s in fastest.items():
                number = str(dtype).removeprefix("torch.")
                print(f"{number:<10}{block_tokens:>6}  {took_s * 1e6:>7.0f}  {name}")


if __name__ == "__main__":
    main()
