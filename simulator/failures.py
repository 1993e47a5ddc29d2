"""What can be wrong with the input of a simulation."""


class SimulationError(ValueError):
    """A trace, a cost or an option that cannot be simulated; the message says which and why."""
