"""Fits gateway/routing/learned/prior.npz again, which is needed when the columns of a prompt change.

    python scripts/fit_router_prior.py llmrouter_9models_train.csv.gz

The file: prompt_id, prompt, task, then one column a model with scores in [0, 1]. Rows of MMLU and GSM8K, in any
language, are left out: routers are judged on those.
"""

import csv
import gzip
import sys
from pathlib import Path
from typing import Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway.routing.learned import features, prior, regression
from gateway.routing.learned.text import parse

LEFT_OUT: Final = ("mmlu", "gsm8k", "mgsm")
ABOUT: Final = ("prompt_id", "prompt", "task")


def main(path: str) -> None:
    """Writes the file from the rows at ``path``."""
    with gzip.open(path, "rt", newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if not any(task in row["task"] for task in LEFT_OUT)
        ]
    models = [name for name in rows[0] if name not in ABOUT]
    columns = np.array([features.describe(parse(row["prompt"])) for row in rows])
    scores = np.array([[float(row[model]) for model in models] for row in rows])
    fitted = regression.fit(columns, scores, np.ones(len(rows)), features.NAMES)
    np.savez(
        Path(prior.__file__).with_name(prior.FILE),
        mean=fitted.mean,
        scale=fitted.scale,
        coefficients=fitted.coefficients,
        intercepts=fitted.intercepts,
    )
    print(f"{len(rows)} prompts, {len(models)} models, {len(features.NAMES)} columns")


if __name__ == "__main__":
    main(sys.argv[1])
