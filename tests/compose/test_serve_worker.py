"""The worker container's own process."""

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from compose.serve_worker import STUB, main, serve, triton_arguments, watch
from sluice.settings import load
from supervisor.triton import RESTRICTED, TritonConfig, triton_command
from tests.support.compose import FOLDER, ROOT

WAIT_S = 60.0


def flags(arguments: tuple[str, ...]) -> list[str]:
    """Flags without what differs between a container and the embedded server."""
    own = (
        r"--(backend-directory|model-repository|grpc-address|grpc-port|allow-metrics)=.*",
        r"--backend-config=python,shm-region-prefix-name=.*",
    )
    return [flag for flag in arguments if not any(re.fullmatch(pattern, flag) for pattern in own)]


def test_triton_gets_the_flags_of_the_embedded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://jaeger:4317")
    settings = load(FOLDER / "sluice.yaml")
    embedded = triton_command(
        TritonConfig(
            name="triton",
            repository=tmp_path,
            models=tuple(model.name for model in settings.models),
            runtime=tmp_path,
            port=8001,
            secret="s3cret",
            otlp_endpoint="http://jaeger:4318",
            load_timeout_s=int(settings.triton.start_s),
        )
    )

    container = triton_arguments(settings, tmp_path, 8001, "s3cret")

    assert sorted(flags(container[1:])) == sorted(flags(embedded[1:]))
    assert "--grpc-address=0.0.0.0" in container


def test_restricted_calls_need_the_secret(tmp_path: Path) -> None:
    arguments = triton_arguments(load(FOLDER / "sluice.yaml"), tmp_path, 8001, "s3cret")

    (restriction,) = (flag for flag in arguments if flag.startswith("--grpc-restricted"))

    assert all(group in restriction for group in RESTRICTED)
    assert restriction.endswith("=s3cret")


def test_a_broken_settings_file_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tmp_path / "sluice.yaml"
    config.write_text("modles: []\n", encoding="utf-8")

    assert (
        main(["--config", str(config), "--port", "8001", "--repository", str(tmp_path / "models")])
        == 1
    )

    (record,) = caplog.records
    assert "modles" in record.message
    assert "\n" not in record.message


@pytest.fixture
def fake_triton(tmp_path: Path) -> tuple[str, ...]:
    """A server with two Python processes, whose names are those of real ones."""
    stub = tmp_path / STUB
    stub.symlink_to("/bin/sleep")
    one = f"{shlex.quote(str(stub))} 60 &"
    return ("/bin/bash", "-c", f"trap 'kill $(jobs -p); exit 0' TERM; {one} {one} wait")


def await_stubs(pid: int, count: int) -> list[psutil.Process]:
    """The Python processes under ``pid`` as soon as there are ``count``."""
    give_up_at = time.monotonic() + WAIT_S
    while time.monotonic() < give_up_at:
        stubs = [child for child in psutil.Process(pid).children(recursive=True) if is_stub(child)]
        if len(stubs) == count:
            return stubs
        time.sleep(0.02)  # nothing tells when a grandchild appears
    raise AssertionError(f"there are not {count} of them")


def is_stub(child: psutil.Process) -> bool:
    argv = child.cmdline()
    return bool(argv) and Path(argv[0]).name == STUB


def test_a_lost_python_process_is_noticed(fake_triton: tuple[str, ...]) -> None:
    with subprocess.Popen(fake_triton) as server:
        pauses = iter(("both are there", "one is killed"))

        def pause(_: float) -> None:
            stub, _another = await_stubs(server.pid, 2)
            if next(pauses) == "one is killed":
                stub.kill()
                stub.wait(WAIT_S)

        try:
            assert watch(server, 2, pause=pause) == 1
        finally:
            server.terminate()
            server.wait(WAIT_S)


def test_sigterm_ends_the_container_cleanly(fake_triton: tuple[str, ...]) -> None:
    program = (
        f"import sys; from compose.serve_worker import serve; sys.exit(serve({fake_triton!r}, 2))"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as process:
        stubs = await_stubs(process.pid, 2)

        process.send_signal(signal.SIGTERM)

        assert process.wait(WAIT_S) == 0
    assert psutil.wait_procs(stubs, WAIT_S)[1] == []


def test_the_end_of_triton_is_the_end_of_the_container() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert serve(("/bin/sh", "-c", "exit 3"), 2) == 3
        assert serve(("/bin/sh", "-c", "exit 0"), 2) == 1
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(number, handler)


def test_every_flag_is_known_to_triton(tmp_path: Path) -> None:
    arguments = triton_arguments(load(FOLDER / "sluice.yaml"), tmp_path, 8001, "s3cret")
    server = triton_command(TritonConfig("triton", tmp_path, (), tmp_path, 8001, "s3cret"))[0]

    usage = subprocess.run([server, "--help"], capture_output=True, text=True, timeout=60)

    for argument in arguments[1:]:
        assert argument.split("=")[0] in usage.stdout + usage.stderr
