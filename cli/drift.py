"""`sluice drift`: input and accuracy drift of the learned routers."""

from dataclasses import asdict

from cli import options, output
from sluice.client.lookups import AccuracyDrift, InputDrift, RouterHealth


def drift(client: options.OperatorClient, as_json: options.Json = False) -> None:
    """Show whether inputs and accuracy of the learned routers have drifted, as one gateway has seen it."""
    routers = client.router_health()
    text = "\n".join(map(line_of, routers)) or "no learned router is in use"
    output.show(as_json, {"routers": [asdict(router) for router in routers]}, text)


def line_of(router: RouterHealth) -> str:
    """A router in one line for people."""
    return (
        f"router {router.policy} ({router.head}, {router.version}):"
        f" {_inputs(router.inputs)}; {_accuracy(router.accuracy)}"
    )


def _inputs(inputs: InputDrift) -> str:
    if inputs.stability_index is None:
        return f"inputs unknown, {inputs.rows} requests are too few"
    word = "shifted" if inputs.state == "drifted" else "stable"
    sign = ">" if inputs.stability_index > inputs.limit else "<="
    index = f"PSI {inputs.stability_index:.2f} {sign} {inputs.limit:.2f}"
    return f"inputs {word} ({index}, {inputs.rows} requests)"


def _accuracy(accuracy: AccuracyDrift) -> str:
    if accuracy.bias is None:
        return "accuracy unknown, no outcomes"
    word = {"drifted": " drifted,", "stable": " holds,"}.get(accuracy.state, "")
    few = "" if word else ", too few"
    bias = f"bias {accuracy.bias:+.2f} +- {accuracy.half_width:.2f}"
    return f"accuracy{word} {bias} on {accuracy.rows} outcomes{few}"
