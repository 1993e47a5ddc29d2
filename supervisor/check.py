"""Check a configuration before anything starts: the file, its policies, its addresses, the folders of its models."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from model_workers.model_folder import check_model
from sluice.errors import SettingsError, SetupError
from sluice.settings import Problem, Settings, load, refuse
from sluice.settings.model_cache import SUFFIX
from sluice.startup import check_reach

_CHECKED: Final = (SettingsError, SetupError)


def load_with_policies(config: Path | None) -> Settings:
    """Return the settings of a file whose routing and safety policies the gateway can use.

    Raises:
        SettingsError: they cannot work; the message has all problems of the file, or else all of the policies.
    """
    settings = load(config)
    refuse(_policy_problems(settings), config)
    return settings


def check(config: Path | None) -> Settings:
    """Return the settings of a file that a mesh can start with, as far as the file and its models decide.

    Raises:
        SettingsError: the message has all problems of the file, or else all of what it names.
    """
    settings = load(config)
    problems = [*_policy_problems(settings), *_reach_problems(settings), *_model_problems(settings)]
    refuse(problems, config)
    return settings


def _policy_problems(settings: Settings) -> Iterator[Problem]:
    from gateway.routing.router import check_patterns

    yield from _problems(check_patterns, settings.routing)
    if settings.safety:
        # Imported here: it reads all safety rules, which a mesh with policies of its own alone needs.
        from gateway.config.policies import read_policies

        yield from _problems(read_policies, settings)


def _reach_problems(settings: Settings) -> Iterator[Problem]:
    served = {"gateway.address": settings.gateway.address, "http.address": settings.http.address}
    for key, address in served.items():
        if address is not None:
            yield from _problems(check_reach, settings, key, address)


def _model_problems(settings: Settings) -> Iterator[Problem]:
    for number, model in enumerate(settings.models):
        if model.path.lower().endswith(SUFFIX) and Path(model.path).expanduser().is_file():
            continue  # `up` converts it, which takes a while
        for problem in _problems(check_model, model):
            text = problem.line.removeprefix(f"models: {model.name}: ")
            yield Problem(("models", number), f"{model.name}: {text}")


def _problems(check: Callable[..., object], *arguments: object) -> list[Problem]:
    try:
        check(*arguments)
    except _CHECKED as error:
        return [Problem.of(line) for line in str(error).splitlines()]
    return []
