"""The NATS container's command and health check, run with the nats-server of the wheel."""

import asyncio
import subprocess
import urllib.request
from pathlib import Path

from sluice.startup import free_port
from supervisor.nats import find_nats_server, wait_for_nats
from tests.support.compose import services, variables
from tests.support.nats import START_S, end


def test_command_starts_jetstream_and_the_health_check_sees_it(tmp_path: Path) -> None:
    port, monitor = free_port(), free_port()
    swaps = {
        "--store_dir=/data": f"--store_dir={tmp_path}",
        f"--port={variables()['NATS_PORT']}": f"--port={port}",
        f"--http_port={variables()['NATS_MONITOR_PORT']}": f"--http_port={monitor}",
    }
    command = services()["nats"]["command"]
    assert set(swaps) <= set(command)
    arguments = [swaps.get(argument, argument) for argument in command]
    url = services()["nats"]["healthcheck"]["test"][-1]
    url = url.replace(variables()["NATS_MONITOR_PORT"], str(monitor))

    with subprocess.Popen(
        [str(find_nats_server()), "--addr=127.0.0.1", *arguments], stderr=subprocess.DEVNULL
    ) as process:
        try:
            asyncio.run(wait_for_nats(f"nats://127.0.0.1:{port}", START_S))
            with urllib.request.urlopen(url, timeout=60) as response:
                assert response.status == 200
        finally:
            end(process)
