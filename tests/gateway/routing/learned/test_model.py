"""Parts of heads, scored."""

import numpy as np

from gateway.routing.learned.model import Example, Trees, pack, prompt_example


def test_a_value_on_the_threshold_goes_to_the_first_child() -> None:
    trees = Trees(
        pack(["word"]),
        np.array([0]),
        np.array([0, 0, 0]),
        np.array([0.5, 0, 0], np.float32),
        np.array([1, 2, 1, 1, 2, 2]),
        np.array([[0, 0], [0.1, 0.2], [0.3, 0.4]], np.float32),
    )
    for value, leaf in ((0.5, 1), (0.51, 2), (-1e30, 1), (1e30, 2)):
        row = np.array([value], np.float32)
        found = trees.predict(Example(row, ["word"], np.zeros(0, np.int64)))
        np.testing.assert_array_equal(found, trees.value[leaf])
    assert trees.counts(["a", "word", "word"]).tolist() == [2]


def test_an_example_is_the_same_in_every_process() -> None:
    example = prompt_example("The sky, the sea")
    assert sorted(example.buckets.tolist()) == example.buckets.tolist()
    assert len(example.buckets) == 3
