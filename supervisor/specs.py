"""How each process of a mesh is started: arguments, environment, log, and how long its end may take."""

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import sluice
from sluice.settings import Settings
from supervisor.child import ChildSpec
from supervisor.nats import NatsConfig, nats_command
from supervisor.plan import MeshPlan
from supervisor.state import StateDir
from supervisor.triton import (
    TritonConfig,
    prepare_runtime,
    triton_command,
    triton_environment,
)

NATS: Final = "nats"
TRITON: Final = "triton"
BATCHER: Final = "batcher"
GATEWAY: Final = "gateway"

_MARGIN_S: Final = 3.0
"""What an orderly end may take beside the drain, seconds."""

_ONE_THREAD: Final[Mapping[str, str]] = {
    # Threads that spin beside other busy processes cost 10 to 40 times; a worker sets its own number.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


def nats_spec(config: NatsConfig, state: StateDir) -> ChildSpec:
    """nats-server; writes its configuration file."""
    return ChildSpec(
        name=NATS,
        argv=nats_command(config, state.root / "nats.conf"),
        env=child_environment(),
        log=state.log(NATS),
        port=config.port,
        stop_s=_MARGIN_S,
    )


def triton_spec(config: TritonConfig, log: Path | None) -> ChildSpec:
    """tritonserver; fills its runtime folder."""
    prepare_runtime(config.runtime)
    return ChildSpec(
        name=TRITON,
        argv=triton_command(config),
        env=triton_environment(config.runtime, child_environment()),
        log=log,
        port=config.port,
        stop_s=config.exit_timeout_s + _MARGIN_S,
    )


def batcher_spec(plan: MeshPlan) -> ChildSpec:
    """The batcher."""
    drain_s = plan.settings.batcher.drain_s
    return _python_spec(BATCHER, plan.state, None, drain_s)


def gateway_spec(plan: MeshPlan) -> ChildSpec:
    """The gateway."""
    port = int(plan.settings.gateway.address.rpartition(":")[2])
    return _python_spec(GATEWAY, plan.state, port, plan.settings.gateway.drain_s)


def module_command(module: str, config: Path | None) -> tuple[str, ...]:
    """Program and arguments of a process of ours; modules of the working directory do not get in its way."""
    command = (sys.executable, "-P", "-m", module)
    return command if config is None else (*command, "--config", str(config))


def child_environment(*, keep_settings: bool = False) -> dict[str, str]:
    """Our environment for a process that shares this machine with others.

    A child reads resolved settings from its file, so variables that override settings are left out, unless
    ``keep_settings``: they have had their say, and ``SLUICE_NATS__PORT=0`` must not undo what came of it.
    """
    kept = {
        key: value for key, value in os.environ.items() if keep_settings or not _is_setting(key)
    }
    environment = {**_ONE_THREAD, **kept}
    root = str(Path(sluice.__file__).resolve().parents[1])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        # A source tree that is not installed.
        parts = (root, environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, parts))
    return environment


def _python_spec(module: str, state: StateDir, port: int | None, drain_s: float) -> ChildSpec:
    return ChildSpec(
        name=module,
        argv=module_command(module, state.config),
        env=child_environment(),
        log=state.log(module),
        port=port,
        stop_s=drain_s + _MARGIN_S,
    )


def _is_setting(variable: str) -> bool:
    prefix = str(Settings.model_config.get("env_prefix", ""))
    section = variable.upper().removeprefix(prefix.upper()).partition("__")[0]
    return variable.upper().startswith(prefix.upper()) and section.lower() in Settings.model_fields
