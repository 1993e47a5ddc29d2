"""What keeps a mesh from starting."""


class SetupError(Exception):
    """Something on this machine is not as it must be; the message is one line that names it and says what to do."""
