"""Sends each request back, or holds it open."""

import json

import triton_python_backend_utils as pb_utils

from sluice.startup import LOOPBACK  # proves that our own packages are found here

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        assert LOOPBACK
        self.held = []

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            payload = pb_utils.get_input_tensor_by_name(request, "request").as_numpy()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("response", payload)]))
            if "hold" in json.loads(request.parameters()):
                self.held.append(sender)
            else:
                sender.send(flags=FINAL)
