"""The vocabulary of the support tasks, from `words.json`: names, products, and descriptions of problems.

In complaints and asides `{p}` is a product, `{q}` another one, `{d}` a number; in closers `{n}` is a name.
Asides carry no label; some have words that complaints of another label use. Changing a word changes every generated
task.
"""

import json
from pathlib import Path
from typing import Any, Final

_WORDS: Final[dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
PROMPTS: Final[dict[str, list[str]]] = _WORDS["prompts"]
"""How a task is phrased, by kind."""
NAMES: Final[list[str]] = _WORDS["names"]
PRODUCTS: Final[list[str]] = _WORDS["products"]
COMPLAINTS: Final[dict[str, list[str]]] = _WORDS["complaints"]
"""What a customer writes, by label."""
LABELS: Final = tuple(COMPLAINTS)
ASIDES: Final[list[str]] = _WORDS["asides"]
OPENERS: Final[list[str]] = _WORDS["openers"]
CLOSERS: Final[list[str]] = _WORDS["closers"]
ORDER_MENTIONS: Final[list[str]] = _WORDS["order_mentions"]
AMOUNT_MENTIONS: Final[list[str]] = _WORDS["amount_mentions"]
THANKS: Final[list[str]] = _WORDS["thanks"]
OFFERS: Final[list[str]] = _WORDS["offers"]
POLICIES: Final[dict[str, str]] = _WORDS["policies"]
"""The policy sentence that a reply must contain, by label."""
SIGNATURE: Final[str] = _WORDS["signature"]
