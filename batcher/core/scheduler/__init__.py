"""The scheduler of one model: tasks in, batches out.

    add -> waiting -> next_batch -> out -> finish
              ^                      |
              +------- requeue ------+

`Queue.next_batch` takes these steps, each with its module:

1. Tasks whose deadline has passed come out.
2. The first row is the one with the smallest key (`order`).
3. A worker with room for it is found (`placement`, `capacity`).
4. The batch is sent now or waits for more rows, and is filled up to its limits (`batch`).

The lengths of answers and the rate of tasks handed out are learned (`estimates`).

Cost: with n tasks that wait, t tenants, w workers and b length buckets that are not empty (one where padding is not
limited, else at most log(longest prompt) / log(bucket_ratio), whatever n is), `add`, `cancel`, `finish` and `requeue`
take O(log n + log t), `next_batch` O(w + b log t) and O(log n + log t) for every row. These are amortized: records of
deadlines stay in a heap until they surface or are most of what is there.
"""

from batcher.core.scheduler.capacity import Capacity as Capacity
from batcher.core.scheduler.queue import Queue as Queue
from batcher.core.scheduler.task import QueuedTask as QueuedTask
