"""Triton Inference Server, that of the `nvidia-pytriton` wheel or another one, with a plain model repository.

Rules for that of the wheel; another one, such as that of NVIDIA's container, finds its parts itself:
- Nothing is written into the wheel. A runtime folder of symbolic links lays the Python backend and the stub for this
  Python side by side, as Triton expects them, and holds the one library the stub needs, libpython.
- That libpython must be the running interpreter's own: with another build of the same version, modules with a C part
  fail to import inside the stub. So it is linked by full path, and no other folder gets on the library path.
- The stub finds our packages as this interpreter does: it embeds the `python3` that is first on PATH, which is the
  one beside `sys.executable`, and gets the rest of `sys.path` (source trees, test roots) by PYTHONPATH.
- Nobody makes the restricted calls, so nobody is told their secret. It is on the command line, the only place where
  Triton takes it: it stops other programs on the port, not a user who can list this user's processes.

docs/internals/notes-triton.md has the measurements.
"""

import asyncio
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sluice.errors import SetupError
from sluice.startup import LOOPBACK, reachable, split_address
from sluice.tls import AUTHORITIES, CERTIFICATE, KEY, channel_credentials, open_channel

RESTRICTED: Final = ("shared-memory", "model-repository", "statistics", "trace", "logging")
"""Groups of calls that only a holder of the secret may make."""

TRACE_SERVICE: Final = "sluice-triton"
"""`service.name` of Triton's own spans."""

STUB: Final = "triton_python_backend_stub"
"""The program that runs a Python model."""

_PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
_BACKENDS: Final = "backends"
_LIBRARIES: Final = "lib"
"""Folders below a runtime folder."""
_BACKEND_FILES: Final = ("libtriton_python.so", "triton_python_backend_utils.py")
HUGE_PAGES: Final[Mapping[str, str]] = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Weights and caches of the stubs lie in huge pages where the kernel has them: a step of one row reads all weights, and
a processor finds few small pages at a time (docs/internals/decisions/engine-numerics.md)."""
_SECRET_KEY: Final = "sluice-secret"
_EXPORT_DELAY_MS: Final = 100
"""How long a finished span may wait for others before it is sent."""
SPANS_S: Final = 2 * _EXPORT_DELAY_MS / 1000
"""How long a server needs to send its last spans, in seconds."""
CHANNEL_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 100),  # the smallest that gRPC takes
    ("grpc.max_reconnect_backoff_ms", 200),
    # A connection of its own: another channel's back-off must not slow this one.
    ("grpc.use_local_subchannel_pool", 1),
)
"""gRPC options of channels that wait for a server: they reconnect often, and share no connection."""
_SHARED_MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True)
class TritonWheel:
    """The parts of an installed `nvidia-pytriton`.

    Attributes:
        server: the `tritonserver` program.
        backend: folder of the Python backend.
        stub: the program that runs a Python model, built for this Python version.
    """

    server: Path
    backend: Path
    stub: Path


@dataclass(frozen=True)
class TritonConfig:
    """What one server serves, and where.

    Attributes:
        name: of the process.
        repository: the model repository.
        models: names of the models to load at start.
        runtime: folder that `prepare_runtime` filled; not used with `program`.
        port: of gRPC.
        secret: value of the header that restricted calls need; letters, digits, "-" and "_".
        host: address to bind.
        otlp_endpoint: base URL of an OTLP/HTTP receiver that takes JSON; None for no spans of Triton's own.
        page: host and port of its page for Prometheus; None: no page.
        exit_timeout_s: how long models may take to finish after SIGTERM, seconds.
        load_timeout_s: how long the server waits for the stub of a model to start, seconds. In 2.51 it does not
            bound the model's own `initialize`.
        tls: folder of its certificate; callers must show one of the mesh. Read at start only.
        shm_prefix: how names of this server's shared memory begin; unique among the servers of a machine.
        nice: CPU priority of the threads that compute.
        program: another `tritonserver` than that of the wheel, which has its Python backend where it looks for it.
    """

    name: str
    repository: Path
    models: tuple[str, ...]
    runtime: Path
    port: int
    secret: str
    host: str = LOOPBACK
    otlp_endpoint: str | None = None
    page: str | None = None
    exit_timeout_s: int = 5
    load_timeout_s: int = 300
    shm_prefix: str = "sluice_triton_"
    tls: Path | None = None
    nice: int = 0
    program: Path | None = None

    @property
    def address(self) -> str:
        """Where to call it, from this machine."""
        return reachable(f"{self.host}:{self.port}")


def find_wheel() -> TritonWheel:
    """Return the parts of the installed wheel.

    Raises:
        SetupError: it is not installed, not complete, or has no stub for this Python version.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise SetupError("nvidia-pytriton is not installed; run: pip install nvidia-pytriton")
    root = Path(next(iter(spec.submodule_search_locations))) / "tritonserver"
    wheel = TritonWheel(
        server=root / "bin" / "tritonserver",
        backend=root / "backends" / "python",
        stub=root / "python_backend_stubs" / _PYTHON / STUB,
    )
    if not wheel.stub.is_file() and wheel.server.is_file():
        message = f"nvidia-pytriton has no stub for Python {_PYTHON}; use Python 3.11 or 3.12"
        raise SetupError(message)
    for program in (wheel.server, wheel.stub):
        if not os.access(program, os.X_OK):
            raise SetupError(
                f"{program} is missing or may not be executed; "
                "run: pip install --force-reinstall nvidia-pytriton"
            )
    return wheel


def find_program(name: str) -> Path:
    """Return a `tritonserver` other than the wheel's, by its path or its name on PATH.

    Raises:
        SetupError: it is not there, or may not be executed.
    """
    path = shutil.which(name)
    if path is None:
        raise SetupError(f"--tritonserver {name}: it is not on PATH, or is no program")
    return Path(path).absolute()


def find_libpython() -> Path:
    """Return the shared library of the running interpreter, from a virtual environment too.

    Raises:
        SetupError: this interpreter was built or installed without one.
    """
    name = f"libpython{_PYTHON}.so.1.0"
    # Relocated builds (uv, conda) may name the build machine's folder as LIBDIR, so the prefix is asked as well.
    folders = (sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib")
    for folder in filter(None, folders):
        library = Path(folder) / name
        if library.is_file():
            return library.resolve()
    raise SetupError(
        f"{name} of {sys.base_prefix} was not found; install a Python with a shared library "
        "(pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared, Debian: the libpython3 package)"
    )


def prepare_runtime(folder: Path) -> None:
    """Fill `folder` with the links that the server needs; correct ones stay.

    Raises:
        SetupError: as `find_wheel` and `find_libpython`, or the folder cannot be written.
    """
    wheel, library = find_wheel(), find_libpython()
    links = {folder / _BACKENDS / "python" / name: wheel.backend / name for name in _BACKEND_FILES}
    links[folder / _BACKENDS / "python" / STUB] = wheel.stub
    # The stub asks for the versioned name, whatever file the library is in.
    links[folder / _LIBRARIES / f"libpython{_PYTHON}.so.1.0"] = library
    try:
        for link, target in links.items():
            _link(link, target)
    except OSError as error:
        raise SetupError(f"{folder}: {error.strerror}; choose a folder to write to") from error


def triton_command(config: TritonConfig) -> tuple[str, ...]:
    """Return program and arguments of a server.

    The configuration of the models must be complete: completing it would start every stub twice.

    Raises:
        SetupError: as `find_wheel`.
    """
    if config.program is not None:
        program = [str(config.program)]
    else:
        backends = config.runtime / _BACKENDS
        program = [str(find_wheel().server), f"--backend-directory={backends}"]
    return (
        *program,
        f"--model-repository={config.repository}",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in config.models),
        "--disable-auto-complete-config",
        "--allow-http=false",
        f"--grpc-address={config.host}",
        f"--grpc-port={config.port}",
        f"--grpc-restricted-protocol={','.join(RESTRICTED)}:{_SECRET_KEY}={config.secret}",
        f"--exit-timeout-secs={config.exit_timeout_s}",
        f"--backend-config=python,shm-region-prefix-name={config.shm_prefix}",
        f"--backend-config=python,stub-timeout-seconds={config.load_timeout_s}",
        # Both serve backends that hold tensors on GPUs in Triton itself; our engines hold their own.
        "--pinned-memory-pool-byte-size=0",
        "--enable-peer-access=false",
        *tls_arguments(config.tls),
        *_metrics_arguments(config.page),
        *_trace_arguments(config.otlp_endpoint),
    )


def tls_arguments(folder: Path | None) -> tuple[str, ...]:
    """Return the options that encrypt Triton's port and require a client certificate."""
    if folder is None:
        return ()
    return (
        "--grpc-use-ssl=true",
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={folder / CERTIFICATE}",
        f"--grpc-server-key={folder / KEY}",
        f"--grpc-root-cert={folder / AUTHORITIES}",
    )


def _metrics_arguments(page: str | None) -> tuple[str, ...]:
    if page is None:
        return ("--allow-metrics=false",)
    host, port = split_address(page, "telemetry.prometheus.triton")
    where = (f"--metrics-address={host}", f"--metrics-port={port}")
    return ("--allow-metrics=true", *where, "--allow-gpu-metrics=false")


def triton_environment(
    runtime: Path | None, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the whole environment of a server: `base` (default: our own) with its paths set.

    `runtime`: the folder that `prepare_runtime` filled; None: the server finds its libraries itself.
    """
    environment = {**HUGE_PAGES, **(os.environ if base is None else base)}
    # A home or a library path for some other interpreter would reach the stub's as well.
    environment.pop("PYTHONHOME", None)
    environment["PATH"] = _joined(Path(sys.executable).parent, environment.get("PATH"))
    if runtime is not None:
        libraries = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = _joined(runtime / _LIBRARIES, libraries)
    # Where this interpreter finds packages beyond the standard library.
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    standard |= {f"{folder}/lib-dynload" for folder in standard}
    folders = [Path(entry) for entry in sys.path if entry not in standard]
    package_folders = (folder for folder in folders if folder.is_absolute() and folder.is_dir())
    environment["PYTHONPATH"] = _joined(*package_folders)
    return environment


async def wait_for_triton(address: str, bound_s: float, tls: Path | None = None) -> None:
    """Wait until the server at `address` answers, which it does once its models are loaded.

    A model that fails to load ends the server instead, so watch the process as well. Nothing in the server bounds how
    long a model may initialize; `bound_s` does.

    Raises:
        TimeoutError: not within `bound_s` seconds.
        SettingsError: the certificate in `tls` cannot be used.
    """
    async with open_channel(address, channel_credentials(tls), CHANNEL_OPTIONS) as channel:
        await asyncio.wait_for(channel.channel_ready(), bound_s)


def remove_shared_memory(prefix: str) -> int:
    """Remove what a killed or crashed server left in shared memory; return the number of regions.

    Only for a server that has ended, with its stubs. `prefix` is its `TritonConfig.shm_prefix`.
    """
    assert prefix, "an empty prefix is everybody's shared memory"
    regions = [path for path in _SHARED_MEMORY.glob("*") if path.name.startswith(prefix)]
    for region in regions:
        region.unlink(missing_ok=True)
    return len(regions)


def _trace_arguments(otlp_endpoint: str | None) -> tuple[str, ...]:
    if otlp_endpoint is None:
        return ()
    settings = (
        "mode=opentelemetry",
        "level=TIMESTAMPS",
        "rate=0",  # none by chance; requests that bring a context are traced all the same
        f"opentelemetry,url={otlp_endpoint.rstrip('/')}/v1/traces",
        f"opentelemetry,resource=service.name={TRACE_SERVICE}",
        f"opentelemetry,bsp_schedule_delay={_EXPORT_DELAY_MS}",
    )
    return tuple(f"--trace-config={setting}" for setting in settings)


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() or link.readlink() != target:
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def _joined(*folders: Path | str | None) -> str:
    return os.pathsep.join(str(folder) for folder in folders if folder)
