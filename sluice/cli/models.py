"""`sluice models`: what can be asked."""

from dataclasses import asdict

from sluice.cli import options, output
from sluice.client.blocking import Client


def models(address: options.Address = options.ADDRESS, as_json: options.Json = False) -> None:
    """List the models of the mesh, and whether each can answer now."""
    with Client(address) as client:
        listed = client.list_models()
    if as_json:
        output.write_json({"models": [asdict(model) for model in listed]})
        return
    output.write_table(
        ("model", "tier", "ready", "context", "slots", "running", "queued"),
        [
            (
                model.name,
                model.tier,
                "yes" if model.ready else "no",
                str(model.context_tokens),
                str(model.slots),
                str(model.running),
                str(model.queued),
            )
            for model in listed
        ],
    )
