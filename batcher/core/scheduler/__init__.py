"""The scheduler of one model: tasks in, batches out.

    add -> waiting -> next_batch -> out -> finish

`Queue.next_batch` asks the batch policy (`policy`, `static`) whether a batch is formed now. It begins with the first
task in order (`order`, `class_order`), goes to a worker with room for it (`placement`, `capacity`), and has what
follows while there is room. A static policy may wait for more tasks (`windows`), and groups them by length. The lengths
of answers and the rate of tasks handed out are learned (`estimates`).

Cost: with n tasks that wait, t tenants and w workers `add`, `cancel` and `finish` take O(log n), and move O(t)
entries of a short list; `next_batch` takes O(w), and as much as `add` for every row.
"""

from batcher.core.scheduler.capacity import Capacity as Capacity
from batcher.core.scheduler.queue import Queue as Queue
from batcher.core.scheduler.task import QueuedTask as QueuedTask
