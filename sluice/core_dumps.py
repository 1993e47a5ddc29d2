"""No process that has prompts or keys in its memory writes that memory to a file."""

import resource


def forbid_core_dumps() -> None:
    """A crash of this process, or of one that it starts from now on, leaves no core dump."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))
