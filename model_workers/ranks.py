"""The ranks of a worker with `tensor_parallel`: one process per device beside the worker's own.

Rank 0 is the worker's process. It writes calls to the standard input of the others, which end when their input or their
parent ends. When one of them ends, the worker ends too.
"""

import logging
import os
import pickle
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Final

import torch
from torch import distributed

from model_workers.engine.checkpoint import limit_threads, load_model_of
from model_workers.engine.devices import find_device
from model_workers.parent import exit_with_parent
from sluice.settings import ModelSettings, SettingsError
from sluice.startup import LOOPBACK, free_port

logger = logging.getLogger(__name__)

MEET_S: Final = 300.0
"""How long the ranks wait for each other at start and in a sum over them, in seconds."""
END_S: Final = 10.0
"""How long a rank may take to end, in seconds."""


class RankProcesses:
    """The processes of ranks 1 and up; see `Followers`."""

    def __init__(self, settings: ModelSettings, on_lost: Callable[[], None]) -> None:
        """Start the ranks and join them as rank 0; `on_lost` is called on another thread when one ends before `close`.

        Raises:
            SettingsError: There are more ranks than devices.
            SetupError: There is no free port.
            RuntimeError: The ranks did not meet within `MEET_S`.
        """
        devices = rank_devices(settings)
        port = free_port()
        self.lost = on_lost
        self._closing = False
        self._processes = [_start() for _ in devices[1:]]
        for rank, process in enumerate(self._processes, 1):
            _write(process, (settings.model_dump_json(), rank, port))
            Thread(target=self._watch, args=(rank, process), daemon=True).start()
        meet(devices, 0, port)

    def send(self, call: str, *arguments: Any) -> None:
        """Send a call to the ranks; see `Followers.send`."""
        for process in self._processes:
            _write(process, (call, arguments))

    def close(self) -> None:
        """End the ranks."""
        self._closing = True
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        distributed.destroy_process_group()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._closing:
            logger.error("rank %d has ended with status %d, and the worker with it", rank, status)
            self.lost()


def rank_devices(settings: ModelSettings) -> Sequence[torch.device]:
    """Return the device of each rank.

    Raises:
        SettingsError: There are fewer devices than ranks.
    """
    ranks = settings.tensor_parallel
    try:
        first = find_device(settings.device)
        if first.type == "cpu" and not settings.devices:
            return [first] * ranks
        numbers = settings.devices or range(ranks)
        return [find_device(f"cuda:{number}") for number in numbers]
    except SettingsError as error:
        message = f"tensor_parallel: {ranks} ranks need {ranks} devices: {error}"
        raise SettingsError(message) from error


def meet(devices: Sequence[torch.device], rank: int, port: int) -> None:
    """Join the process group of the ranks, on this rank's device; set its variables in this process's environment."""
    device = devices[rank]
    # What transformers reads: it takes the device of the number LOCAL_RANK.
    environment = {"RANK": rank, "WORLD_SIZE": len(devices), "LOCAL_RANK": device.index or 0}
    os.environ.update({name: str(number) for name, number in environment.items()})
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"tcp://{LOOPBACK}:{port}",
        rank=rank,
        world_size=len(devices),
        timeout=timedelta(seconds=MEET_S),
    )


def _start() -> subprocess.Popen[bytes]:
    # Inside Triton the program is the stub, and its paths are not in the environment.
    python = sys.executable
    if not Path(python).name.startswith("python"):
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        python = str(Path(sysconfig.get_config_var("BINDIR"), version))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = (python, "-P", "-m", "model_workers.ranks")
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment)


def _write(process: subprocess.Popen[bytes], thing: object) -> None:
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(thing))
    process.stdin.flush()


def follow() -> None:
    """Run a rank other than rank 0: make the calls from standard input until it ends."""
    text, rank, port = pickle.load(sys.stdin.buffer)
    exit_with_parent()
    settings = ModelSettings.model_validate_json(text)
    limit_threads(settings.threads)
    devices = rank_devices(settings)
    meet(devices, rank, port)
    model: Any = load_model_of(settings, str(devices[rank]))
    while True:
        try:
            call, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if call == "paged":
            model = model.paged(*arguments)
        else:
            getattr(model, call)(*arguments)


if __name__ == "__main__":
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    follow()
