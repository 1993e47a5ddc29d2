"""The model class of Triton's Python backend: unpacks requests and passes them to the `Worker`.

The model is decoupled: `execute` returns at once, and responses follow through each request's response sender, ended by
the FINAL flag. A stub process serves one model instance, so process-wide settings are made here.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from threading import Condition
from typing import Any, Final

import numpy as np
import triton_python_backend_utils as pb_utils

from model_workers.deploy import PARAMETER, REQUEST, RESPONSE
from model_workers.parent import exit_with_parent
from model_workers.process import build_engine
from model_workers.shared_memory import make_shared_memory_private
from model_workers.worker import InboxFull, Worker, notify
from sluice.core_dumps import forbid_core_dumps
from sluice.internal.v1 import worker_pb2
from sluice.interpreter import freeze_heap
from sluice.settings import ModelSettings
from sluice.telemetry.environment import clean
from sluice.telemetry.names import SERVICE_WORKER
from sluice.telemetry.tracing import TRACEPARENT, start_tracing
from sluice.wire.codec import MalformedMessage, unpack

logger = logging.getLogger(__name__)

FINAL: Final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonResponseSender:
    """The response sender of one request; see `model_workers.channels.ResponseSender`."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def send(self, report: worker_pb2.StepReport) -> None:
        """Send a report; block for one round trip through shared memory."""
        payload = np.frombuffer(report.SerializeToString(), dtype=np.uint8)
        tensor = pb_utils.Tensor(RESPONSE, payload)
        self._sender.send(pb_utils.InferenceResponse(output_tensors=[tensor]))

    def close(self) -> None:
        """Send the FINAL flag alone."""
        self._sender.send(flags=FINAL)

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled its stream."""
        return bool(self._sender.is_cancelled())

    def refuse(self, reason: str) -> None:
        """Refuse the request and end it."""
        self.send(worker_pb2.StepReport(refused=reason))
        self.close()


class TritonPythonModel:
    """The model class that Triton's Python backend loads."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Build the engine and start the worker's threads; an exception makes the model unavailable."""
        forbid_core_dumps()
        make_shared_memory_private()
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        exit_with_parent(self._end)
        settings = _settings(args["model_config"])
        # Before torch is imported, by build_engine: OpenMP reads it once.
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
        changed = Condition()
        engine = build_engine(settings, partial(notify, changed))
        clean()
        self._tracing = start_tracing(SERVICE_WORKER)
        # A process whose engine has ended or hangs is of no use; the supervisor restarts it.
        self._worker = Worker(
            settings.name, engine, self._tracing.tracer, lambda: os._exit(1), changed
        )
        freeze_heap()
        self._worker.start()
        logger.info("worker %s serves %s", self._worker.worker_id, settings.name)

    def execute(self, requests: Sequence[Any]) -> None:
        """Accept requests; their responses follow later."""
        for request in requests:
            # Each request is refused by itself; an exception here would end all of this call.
            responses = TritonResponseSender(request.get_response_sender())
            try:
                self._worker.handle(_message(request), responses, _traceparent(request))
            except (MalformedMessage, InboxFull) as error:
                responses.refuse(str(error))

    def _end(self) -> None:
        """Finalize on SIGTERM, unless the model is still loading."""
        if hasattr(self, "_worker"):
            self.finalize()

    def finalize(self) -> None:
        """End the threads, then export the remaining spans."""
        logger.info("worker %s ends", self._worker.worker_id)
        self._worker.stop()
        self._tracing.shutdown()
        logger.info("worker %s has ended", self._worker.worker_id)


def _settings(model_config: str) -> ModelSettings:
    parameters = json.loads(model_config)["parameters"]
    return ModelSettings.model_validate_json(parameters[PARAMETER]["string_value"])


def _message(request: Any) -> worker_pb2.WorkerRequest:
    tensor = pb_utils.get_input_tensor_by_name(request, REQUEST)
    if tensor is None:
        raise MalformedMessage(f"the tensor {REQUEST!r} is missing")
    return unpack(worker_pb2.WorkerRequest, tensor.as_numpy().tobytes())


def _traceparent(request: Any) -> str:
    """Return the context of Triton's own span, else the request's parameter; empty without both.

    Triton loses the context of some streams, so batchers also send it as a parameter.
    """
    context = request.trace().get_context() or request.parameters()
    return str(json.loads(context).get(TRACEPARENT, "")) if context else ""
