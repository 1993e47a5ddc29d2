"""What both ends of a wire in Sluice must agree on, the client, and the command line."""

__version__ = "0.1.0"
