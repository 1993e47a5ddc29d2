"""What will run, and whether it can: every check that is possible before anything is started.

Each problem is one line that names the setting and says what to do (`SetupError`, `SettingsError`).
"""

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from model_workers.deploy import check_model
from sluice.errors import SetupError
from sluice.settings import PrometheusSettings, Settings, SettingsError, otlp_http_endpoint
from sluice.startup import (
    LOOPBACK,
    answers,
    free_port,
    is_loopback,
    listen_problem,
    split_address,
)
from supervisor import nats, triton
from supervisor.state import StateDir

EXTERNAL_BOUND_S: Final = 3.0
"""How long a server that somebody else runs may take to accept a connection, seconds."""


@dataclass(frozen=True)
class MeshPlan:
    """A mesh that can be started.

    Attributes:
        settings: with every address filled in.
        nats: the embedded server; None when an external one is named.
        triton: the embedded server; None when every model is served elsewhere.
    """

    settings: Settings
    state: StateDir
    nats: nats.NatsConfig | None
    triton: triton.TritonConfig | None


def make_plan(settings: Settings, state: StateDir) -> MeshPlan:
    """Checks ``settings`` and this machine, and picks ports; starts nothing and writes nothing.

    Raises:
        SetupError: something on this machine is missing or taken.
        SettingsError: a model folder is broken.
    """
    check_models(settings)
    taken: set[int] = set()
    address = _own_address("gateway.address", settings.gateway.address, taken)
    page = settings.telemetry.prometheus.gateway
    if page is not None:
        page = _own_address("telemetry.prometheus.gateway", page, taken)
    nats_config = _plan_nats(settings, state, taken)
    triton_config = _plan_triton(settings, state, taken)
    resolved = _resolve(settings, address, page, nats_config, triton_config)
    return MeshPlan(resolved, state, nats_config, triton_config)


def plan_triton(settings: Settings, root: Path, host: str, port: int) -> triton.TritonConfig:
    """An embedded server for every model that is not served elsewhere, with its files under ``root``.

    Raises:
        SetupError: Triton's wheel or libpython is missing.
    """
    triton.find_wheel()
    triton.find_libpython()
    endpoint = otlp_http_endpoint(settings)
    return triton.TritonConfig(
        repository=root / "models",
        models=embedded_models(settings),
        runtime=root / "triton",
        port=port,
        host=host,
        secret=secrets.token_urlsafe(24),
        otlp_endpoint=endpoint.removesuffix("/v1/traces") if endpoint else None,
        load_timeout_s=max(1, int(settings.triton.start_s)),
        shm_prefix=shm_prefix(root),
    )


def shm_prefix(root: Path) -> str:
    """How shared memory is named in this folder: the same at every start, so that what a killed one left is found."""
    return f"sluice_{hashlib.sha256(bytes(root)).hexdigest()[:12]}_"


def embedded_models(settings: Settings) -> tuple[str, ...]:
    """The Triton models that the embedded Triton serves."""
    if settings.triton.url is not None:
        return ()
    embedded = (model for model in settings.models if not model.triton_urls)
    return tuple(name for model in embedded for name in model.triton_models)


def check_models(settings: Settings) -> None:
    """Raises SettingsError for the first model that cannot be served."""
    for model in settings.models:
        try:
            check_model(model)
        except SettingsError as error:
            key = f"models: {model.name}: "
            raise SettingsError(key + str(error).removeprefix(key)) from error


def checked_port(key: str, host: str, port: int, taken: set[int]) -> int:
    """``port``, or a free one for 0; it is added to ``taken``.

    Raises:
        SetupError: it cannot be listened on; ``key`` names the setting.
    """
    if port == 0:
        port = free_port(host, taken)
    elif problem := listen_problem(host, port):
        raise SetupError(f"{key}: {host}:{port} is {problem}; free it or choose another one")
    elif port in taken:
        raise SetupError(
            f"{key}: port {port} is another server's of this mesh already; choose another"
        )
    taken.add(port)
    return port


def _own_address(key: str, address: str, taken: set[int]) -> str:
    host, port = split_address(address, key)
    if not is_loopback(host):
        raise SetupError(
            f"{key}: {host} can be reached from other machines and there are no "
            f"credentials; use {LOOPBACK}"
        )
    port = checked_port(key, host, port, taken)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _plan_nats(settings: Settings, state: StateDir, taken: set[int]) -> nats.NatsConfig | None:
    if settings.nats.url is not None:
        _check_external("nats.url", settings.nats.url)
        return None
    nats.find_nats_server()
    port = checked_port("nats.port", LOOPBACK, settings.nats.port, taken)
    return nats.NatsConfig(port=port, store=state.nats)


def _plan_triton(
    settings: Settings, state: StateDir, taken: set[int]
) -> triton.TritonConfig | None:
    for index, model in enumerate(settings.models):
        for url in model.triton_urls:
            _check_external(f"models.{index}.triton_url", url)
    if settings.triton.url is not None:
        _check_external("triton.url", settings.triton.url)
    if not embedded_models(settings):
        return None
    port = checked_port("triton.port", LOOPBACK, settings.triton.port, taken)
    return plan_triton(settings, state.root, LOOPBACK, port)


def _check_external(key: str, url: str) -> None:
    host, port = split_address(url.rpartition("://")[2].rpartition("@")[2].rstrip("/"), key)
    if not answers(host, port, EXTERNAL_BOUND_S):
        raise SetupError(f"{key}: nobody answers at {host}:{port}; start it, or remove {key}")


def _resolve(
    settings: Settings,
    address: str,
    page: str | None,
    nats_config: nats.NatsConfig | None,
    triton_config: triton.TritonConfig | None,
) -> Settings:
    update: dict[str, object] = {
        "gateway": settings.gateway.model_copy(update={"address": address}),
        "telemetry": settings.telemetry.model_copy(
            update={"prometheus": PrometheusSettings(gateway=page)}
        ),
    }
    if nats_config is not None:
        url = f"nats://{nats_config.host}:{nats_config.port}"
        update["nats"] = settings.nats.model_copy(update={"url": url, "port": nats_config.port})
    if triton_config is not None:
        url = f"{triton_config.host}:{triton_config.port}"
        update["triton"] = settings.triton.model_copy(
            update={"url": url, "port": triton_config.port}
        )
    return settings.model_copy(update=update)
