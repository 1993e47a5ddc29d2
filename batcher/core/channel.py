"""What a batcher knows of a worker from its channel: whether frames are complete, and how much room there is."""

from sluice.internal.v1 import worker_pb2


class ChannelBroken(Exception):
    """Responses are missing, or come from another process: rows of this channel must be sent again."""


class Channel:
    """One channel, from its opening to its loss. A new one is made for every opening."""

    def __init__(self) -> None:
        self.worker = ""
        self._load = worker_pb2.WorkerLoad()
        self._next_sequence = 0
        self._refused = False

    @property
    def live(self) -> bool:
        """Whether the worker has spoken."""
        return self.worker != ""

    @property
    def slots(self) -> int:
        """Rows the worker computes at once; 0 before it has spoken."""
        return self._load.slots

    @property
    def running(self) -> int:
        """Rows in it, of all batchers."""
        return self._load.running

    def step(self, report: worker_pb2.StepReport) -> None:
        """Takes a response of the channel.

        Raises:
            ChannelBroken: one before it is missing, or the worker is another one.
        """
        if report.sequence != self._next_sequence:
            raise ChannelBroken(f"response {report.sequence} instead of {self._next_sequence}")
        if self.live and report.worker != self.worker:
            raise ChannelBroken(f"worker {report.worker} instead of {self.worker}")
        self.worker = report.worker
        self._next_sequence += 1
        self._refused = False
        self._load = report.load

    def admitted(self, admission: worker_pb2.Admission) -> None:
        """Takes the answer to a batch."""
        # After a refusal nothing is sent until the worker's next word: it would be refused again.
        self._refused = any(refusal.retryable for refusal in admission.refused)
        if admission.HasField("load"):
            self._load = admission.load

    def capacity(self, in_flight: int, unanswered: int) -> int:
        """Rows that may be sent now.

        ``in_flight`` rows of this batcher are in the worker or on the way, ``unanswered`` of them on the way. The
        worker's own count may be older than either, so the larger one is believed.
        """
        if not self.live or self._refused:
            return 0
        reported = self._load.running + self._load.waiting + unanswered
        return max(0, self._load.slots - max(in_flight, reported))
