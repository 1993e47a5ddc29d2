import pytest
import torch

from model_workers.engine.forward.kv_cache import Fp8KvCache, KvCache, LayerShape

SHAPES = (LayerShape(4, 2, 6, 6), LayerShape(4, 1, 3, 5))


def pages() -> KvCache:
    return KvCache(
        SHAPES, num_blocks=5, block_tokens=4, dtype=torch.float32, device=torch.device("cpu")
    )


def filled() -> KvCache:
    full = pages()
    for tensor in (*full.keys, *full.values):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    return full


def test_a_token_lies_where_it_was_written() -> None:
    cache = pages()
    key, value = torch.randn(2, 1, 3), torch.randn(2, 1, 5)
    cache.write(1, torch.tensor([4, 0]), torch.tensor([3, 1]), key, value)
    assert torch.equal(cache.keys[1][4, :, :, 3], key[0])
    assert torch.equal(cache.values[1][0, :, 1], value[1])
    assert cache.keys[1].count_nonzero() == key.numel()
    assert not cache.keys[0].any()


def test_copies_and_clears_whole_blocks_in_all_layers() -> None:
    cache, before = filled(), filled()
    cache.copy([(1, 3), (2, 4)])
    cache.clear([0])
    pairs = zip((*cache.keys, *cache.values), (*before.keys, *before.values), strict=True)
    for tensor, old in pairs:
        assert torch.equal(tensor[3], old[1])
        assert torch.equal(tensor[4], old[2])
        assert torch.equal(tensor[1], old[1])
        assert not tensor[0].any()


def test_the_size_of_a_block_is_what_the_tensors_take() -> None:
    cache = pages()
    total = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert KvCache.bytes_per_block(SHAPES, 4, torch.float32) * 5 == total


def in_eight_bits(dtype: torch.dtype = torch.float32) -> Fp8KvCache:
    return Fp8KvCache(SHAPES, num_blocks=5, block_tokens=4, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_are_close_whatever_the_size_of_the_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache, tokens = in_eight_bits(dtype), torch.arange(16)
    sizes = torch.logspace(-12, 12, 16)[:, None, None]
    key, value = (torch.randn(16, 1, size) * sizes for size in (3, 5))
    cache.write(1, 1 + tokens // 4, tokens % 4, key.to(dtype), value.to(dtype))
    found = cache.read(1, torch.tensor([1, 2, 3, 4]))
    for read, new in zip(found, (key, value), strict=True):
        assert read.dtype is dtype
        read = read.flatten(0, 1).float()
        largest = new.abs().amax(-1, keepdim=True)
        # Three bits behind the first; what is 2^14 times smaller than the largest of the head has fewer.
        assert ((read - new).abs() <= 0.07 * new.abs() + 2.0**-17 * largest).all()
    assert not cache.read(0, torch.tensor([1]))[0].any()


def test_eight_bits_keep_what_is_not_a_number_and_what_is_nothing() -> None:
    cache, tokens = in_eight_bits(), torch.arange(4)
    key = torch.tensor([0.0, float("nan"), 3e38, 1e-40])[:, None, None].expand(4, 1, 3)
    cache.write(1, tokens * 0, tokens, key, torch.zeros(4, 1, 5))
    keys, values = cache.read(1, torch.tensor([0]))
    assert keys[0, :, 0, 0].isfinite().tolist() == [True, False, True, True]
    assert not keys[0, [0, 3]].any()
    assert not values.any()
    torch.testing.assert_close(keys[0, 2], key[2], rtol=0.07, atol=0)
    cache.clear([0])
    assert not cache.read(1, torch.tensor([0]))[0].any()


def test_eight_bits_are_copied_with_their_scales() -> None:
    cache, tokens = in_eight_bits(), torch.arange(4)
    cache.write(0, tokens * 0 + 2, tokens, 100 * torch.randn(4, 2, 6), torch.randn(4, 2, 6))
    cache.copy([(2, 4)])
    for table in cache.read(0, torch.tensor([2, 4])):
        assert table[0].any()
        assert torch.equal(*table)


def test_eight_bits_take_half_of_sixteen() -> None:
    cache = in_eight_bits()
    total = sum(tensor.nbytes for tensor in cache._tensors())
    assert Fp8KvCache.bytes_per_block(SHAPES, 4, torch.float32) * 5 == total
    llama = (LayerShape(32, 8, 128, 128),) * 32
    sixteen = KvCache.bytes_per_block(llama, 256, torch.bfloat16)
    assert Fp8KvCache.bytes_per_block(llama, 256, torch.bfloat16) < 0.51 * sixteen
