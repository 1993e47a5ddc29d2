"""No process that has prompts or keys in its memory writes that memory to a file."""

import resource


def forbid_core_dumps() -> None:
    """Forbid core dumps of this process and of those that it starts from now on."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))
