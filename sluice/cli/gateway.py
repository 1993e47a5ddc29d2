"""`sluice gateway`: one gateway in the foreground, for containers."""

from sluice.cli import process


def gateway(config: process.Config, id: process.Id = None) -> None:
    """Run one gateway in the foreground until SIGTERM."""
    process.become("gateway", config, id)
