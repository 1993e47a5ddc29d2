"""Sends each request back `count` times, or holds it open and sends what later requests bring."""

import json
import os
import select
import threading

import triton_python_backend_utils as pb_utils

from sluice.startup import LOOPBACK  # proves that our own packages are found here

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def end_with(pid):
    """A stub can outlive a killed server; the descriptor becomes readable when the server ends."""
    with open(os.pidfd_open(pid)) as server:
        select.select([server], [], [])
        os._exit(1)


class TritonPythonModel:
    def initialize(self, args):
        assert LOOPBACK
        self.held = []
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()

    def execute(self, requests):
        for request in requests:
            self.answer(request, request.get_response_sender())

    def answer(self, request, sender):
        parameters = json.loads(request.parameters())
        payload = pb_utils.get_input_tensor_by_name(request, "request").as_numpy()
        response = pb_utils.InferenceResponse([pb_utils.Tensor("response", payload)])
        if "hold" in parameters:
            self.held.append(sender)
            sender.send(response)
            return
        for _ in range(parameters.get("count", 1)):
            sender.send(response)
        while self.held and "release" in parameters:
            held = self.held.pop()
            held.send(response)
            held.send(flags=FINAL)
        sender.send(flags=FINAL)
