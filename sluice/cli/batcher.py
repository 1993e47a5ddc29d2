"""`sluice batcher`: one batcher in the foreground, for containers."""

from sluice.cli import process


def batcher(config: process.Config, id: process.Id = None) -> None:
    """Run one batcher in the foreground until SIGTERM."""
    process.become("batcher", config, id)
