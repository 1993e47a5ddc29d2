"""The parts of a configuration that a gateway loads, and loads again while it runs."""
