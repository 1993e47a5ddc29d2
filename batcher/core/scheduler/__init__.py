"""Scheduler of one model: requests in, batches out.

    add -> waiting -> next_batch -> in a worker -> finish

`Queue.next_batch` asks the batch policy (`policy`) whether to form a batch now. The batch
starts with the first request in order (`order`, `class_order`), goes to a worker with free capacity
(`placement`, `capacity`) and takes the following requests while they fit. A static policy may wait
for more requests and groups them by length. Answer lengths and service rates are
learned from traffic (`estimates`, `speed`); `waits` predicts from them how long a new request will
wait.

With n waiting requests, t tenants and w workers, `add`, `cancel` and `finish` take O(log n) and
move O(t) entries of a short list. `next_batch` takes O(w), plus the cost of one `add` per request; if padding is
limited, it may also look at every waiting request.
"""

from batcher.core.scheduler.capacity import Capacity as Capacity
from batcher.core.scheduler.entry import QueueEntry as QueueEntry
from batcher.core.scheduler.queue import Queue as Queue
