"""Serves the workers in a container: ``serve_worker.py --config FILE --port PORT --repository FOLDER``.

Renders the model repository, runs Triton on it, and ends when Triton ends, or when a Python process behind a model
has ended: Triton does not start it again and goes on to answer that it is ready. The container's restart policy does
the rest.
"""

import argparse
import logging
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import psutil

from model_workers.deploy import render_repository
from sluice.settings import Settings, SettingsError, load, otlp_http_endpoint
from supervisor.triton import RESTRICTED, TRACE_SERVICE, tls_arguments

STUB: Final = "triton_python_backend_stub"
POLL_S: Final = 0.5
STOP_S: Final = 10.0
"""How long Triton may take to end after SIGTERM."""

logger = logging.getLogger("sluice.worker")


def triton_arguments(
    settings: Settings, repository: Path, port: int, secret: str
) -> tuple[str, ...]:
    """Program and arguments of Triton: those of the embedded one (supervisor/triton.py), open to the network.

    ``secret`` is what restricted calls would need; nobody is told, so nobody makes them.
    """
    return (
        "tritonserver",
        f"--model-repository={repository}",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for model in settings.models for name in model.triton_models),
        "--disable-auto-complete-config",
        "--allow-http=false",
        "--allow-metrics=false",
        "--grpc-address=0.0.0.0",
        f"--grpc-port={port}",
        f"--grpc-restricted-protocol={','.join(RESTRICTED)}:sluice-secret={secret}",
        "--exit-timeout-secs=5",
        f"--backend-config=python,stub-timeout-seconds={int(settings.triton.start_s)}",
        "--pinned-memory-pool-byte-size=0",
        "--enable-peer-access=false",
        *tls_arguments(settings.tls.mesh),
        *_trace_arguments(otlp_http_endpoint(settings)),
    )


def _trace_arguments(url: str | None) -> tuple[str, ...]:
    if url is None:
        return ()
    return (
        "--trace-config=mode=opentelemetry",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=0",
        f"--trace-config=opentelemetry,url={url}",
        f"--trace-config=opentelemetry,resource=service.name={TRACE_SERVICE}",
        "--trace-config=opentelemetry,bsp_schedule_delay=100",
    )


def watch(
    server: subprocess.Popen[bytes],
    models: int,
    asked_to_end: Callable[[], bool] = lambda: False,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Looks after Triton until it shall not go on; returns the exit code for the container.

    That is 0 when the end was asked for, Triton's own code when it has ended by itself, and 1 when one of ``models``
    lost its Python process.
    """
    most = 0
    while (code := server.poll()) is None:
        stubs = _stubs(server)
        if asked_to_end():
            return 0  # Triton ends those processes itself now
        if stubs < most:
            logger.error("a model's Python process has ended: %d of %d are left", stubs, models)
            return 1
        # While models load, their processes appear one by one.
        most = max(most, stubs)
        pause(POLL_S)
    if asked_to_end():
        return 0
    logger.error("tritonserver ended with exit code %d", code)
    return int(code) or 1


def _stubs(server: subprocess.Popen[bytes]) -> int:
    try:
        return sum(_is_stub(child) for child in psutil.Process(server.pid).children())
    except psutil.NoSuchProcess:
        return 0


def _is_stub(child: psutil.Process) -> bool:
    try:
        argv = child.cmdline()
        return bool(argv) and Path(argv[0]).name == STUB and child.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def serve(command: Sequence[str], models: int) -> int:
    """Runs ``command`` until it ends, a model is lost, or SIGTERM or SIGINT asks for the end."""
    server = subprocess.Popen(command)
    asked = threading.Event()

    def end(_number: int, _frame: object) -> None:
        if not asked.is_set():  # a second SIGTERM would make Triton drop what it is finishing
            asked.set()
            server.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    code = watch(server, models, asked.is_set)
    if not asked.is_set():
        server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    return code


def main(arguments: Sequence[str]) -> int:
    """Renders and serves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--repository", type=Path, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    try:
        settings = load(options.config)
        render_repository(settings, options.repository)
    except SettingsError as error:
        logger.error("%s", error)
        return 1
    secret = secrets.token_urlsafe(24)
    command = triton_arguments(settings, options.repository, options.port, secret)
    return serve(command, sum(len(model.triton_models) for model in settings.models))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
