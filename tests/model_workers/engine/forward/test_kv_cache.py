import torch

from model_workers.engine.forward.kv_cache import KvCache, LayerShape

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
