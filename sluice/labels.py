"""The labels of a sequence classifier: its worker answers with their numbers, the gateway reads them as names."""

from collections.abc import Mapping
from typing import Any


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels of a Hugging Face configuration by number.

    Raises:
        ValueError: there are fewer than two, or their numbers have gaps; the message says what to write.
    """
    named = config.get("id2label")
    hint = 'name them in id2label, such as {"0": "benign", "1": "malicious"}'
    if not isinstance(named, dict) or len(named) < 2:
        raise ValueError(f"has no labels; {hint}")
    names = [named.get(str(number)) for number in range(len(named))]
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise ValueError(f"numbers its labels otherwise than 0, 1, 2 and so on, each once; {hint}")
    return tuple(str(name) for name in names)
