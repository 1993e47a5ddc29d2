"""`sluice drift`: input and accuracy drift of the learned routers."""

from typing import Any

from cli import options, output
from sluice.v1.admin_pb2 import (
    DRIFT_STATE_DRIFTED,
    DRIFT_STATE_STABLE,
    AccuracyDrift,
    InputDrift,
    RouterHead,
    RouterHealth,
)
from sluice.wire.enums import word_of


def drift(client: options.OperatorClient) -> None:
    """Show whether inputs and accuracy of the learned routers have drifted, as one gateway has seen it."""
    routers = client.router_health()
    text = "\n".join(map(line_of, routers)) or "no learned router is in use"
    output.show({"routers": [*map(health_object, routers)]}, text)


def health_object(router: RouterHealth) -> dict[str, Any]:
    """A router for `--json`."""
    described = output.message_object(router)
    described["inputs"] = output.message_object(router.inputs)
    described["accuracy"] = output.message_object(router.accuracy)
    if not router.inputs.HasField("stability_index"):
        described["inputs"]["stability_index"] = None
    if not router.accuracy.HasField("bias"):
        described["accuracy"] |= {"bias": None, "brier": None}
    return described


def line_of(router: RouterHealth) -> str:
    """A router in one line for people."""
    return (
        f"router {router.policy} ({word_of(RouterHead, router.head)}, {router.version}):"
        f" {_inputs(router.inputs)}; {_accuracy(router.accuracy)}"
    )


def _inputs(inputs: InputDrift) -> str:
    if not inputs.HasField("stability_index"):
        return f"inputs unknown, {inputs.rows} requests are too few"
    word = "shifted" if inputs.state == DRIFT_STATE_DRIFTED else "stable"
    sign = ">" if inputs.stability_index > inputs.limit else "<="
    index = f"PSI {inputs.stability_index:.2f} {sign} {inputs.limit:.2f}"
    return f"inputs {word} ({index}, {inputs.rows} requests)"


def _accuracy(accuracy: AccuracyDrift) -> str:
    if not accuracy.HasField("bias"):
        return "accuracy unknown, no outcomes"
    words = {DRIFT_STATE_DRIFTED: " drifted,", DRIFT_STATE_STABLE: " holds,"}
    word = words.get(accuracy.state, "")
    few = "" if word else ", too few"
    bias = f"bias {accuracy.bias:+.2f} +- {accuracy.half_width:.2f}"
    return f"accuracy{word} {bias} on {accuracy.rows} outcomes{few}"
