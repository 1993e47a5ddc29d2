"""What is known before the first outcome: which prompts open models of 7B to 70B get wrong, on other tasks.

prior.npz holds nine logistic regressions on the columns of a prompt, fitted by scripts/fit_router_prior to the
LLMRouter outcomes (ulab-uiuc/LLMRouter, MIT licence) without their rows of MMLU and GSM8K. Their outputs are columns
of the forest: whether a model at hand fails in the same places is learned from its own outcomes.
"""

from functools import cache
from importlib import resources
from typing import Final

import numpy as np

from gateway.routing.learned import features
from gateway.routing.learned.linear import Linear

FILE: Final = "prior.npz"


@cache
def load() -> Linear:
    """The prior of this package."""
    with (
        resources.files(__package__).joinpath(FILE).open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        prior = Linear(*(arrays[name] for name in ("mean", "scale", "coefficients", "intercepts")))
    assert len(prior.mean) == len(features.NAMES), "prior.npz was fitted to other columns"
    return prior
