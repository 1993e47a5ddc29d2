"""The garbage collector's view of a long-lived process."""

import gc


def freeze() -> None:
    """Takes what was built at the start out of the collector's sight; call it once, when the process is ready.

    Rules, models and modules live as long as the process. With them every full collection stops the event loop for
    tens of milliseconds, and calls that came meanwhile wait.
    """
    gc.collect()
    gc.freeze()
