"""Renders the Triton model repository of a configuration, and checks model folders before anything is started.

``python -m model_workers.deploy --config FILE --out DIR`` writes the repository.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from model_workers.model_folder import check_model
from model_workers.placement import place
from sluice.settings import ModelSettings, Settings, SettingsError, load, resolve_model_path

REQUEST: Final = "request"
RESPONSE: Final = "response"
PARAMETER: Final = "model_settings"
"""The parameter of config.pbtxt that carries the `ModelSettings` as JSON."""

_CONFIG: Final = """\
name: "{name}"
backend: "python"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
input [ {{ name: "{request}" data_type: TYPE_UINT8 dims: [ -1 ] }} ]
output [ {{ name: "{response}" data_type: TYPE_UINT8 dims: [ -1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
parameters [ {{ key: "{parameter}" value: {{ string_value: {settings} }} }} ]
"""

_MODEL: Final = '''\
"""The entry point of Triton's Python backend; all code is in the model_workers package."""

from model_workers.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def render_repository(settings: Settings, folder: Path) -> None:
    """Writes one Triton model per worker of each configured model into ``folder``, which is made when missing.

    Raises:
        SettingsError: a relative model folder is missing, or the models do not fit on their devices.
    """
    for name, model in place(settings.models).items():
        _render(model, name, folder)


def render_workers(models: Sequence[ModelSettings], folder: Path) -> None:
    """Writes a repository for each worker, ``folder``/NAME.1 for example, whose only Triton model is called NAME.

    Raises:
        SettingsError: as `render_repository`.
    """
    for name, model in place(models).items():
        _render(model, model.name, folder / name)


def _render(model: ModelSettings, name: str, folder: Path) -> None:
    version = folder / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    (folder / name / "config.pbtxt").write_text(_config(model, name), encoding="utf-8")
    (version / "model.py").write_text(_MODEL, encoding="utf-8")


def _config(model: ModelSettings, name: str) -> str:
    paths = {"path": _absolute(model.path), "draft": model.draft and _absolute(model.draft)}
    values = model.model_copy(update=paths).model_dump_json()
    return _CONFIG.format(
        name=name,
        request=REQUEST,
        response=RESPONSE,
        parameter=PARAMETER,
        settings=json.dumps(values, ensure_ascii=False),
    )


def _absolute(path: str) -> str:
    """Makes a path absolute, because Triton runs in another working directory."""
    if path.startswith("builtin:"):
        return path
    path = resolve_model_path(path)
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m model_workers.deploy", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the YAML configuration")
    parser.add_argument("--out", type=Path, required=True, help="folder of the repository")
    options = parser.parse_args(arguments)
    try:
        settings = load(options.config)
        for model in settings.models:
            check_model(model)
        render_repository(settings, options.out)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
