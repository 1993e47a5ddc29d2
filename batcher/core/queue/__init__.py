"""The queue of one model: tasks in, batches out.

    add -> waiting -> next_batch -> out -> finish
              ^                      |
              +------- requeue ------+

`Queue.next_batch` goes these steps, each with its module:

1. Tasks whose deadline has passed come out.
2. The first row is that of a class that is overdue, else of the most urgent class (`waiting`); inside a class what came
   back goes first, then what is urgent, then the tenant that was given least (`classes`, `accounts`, `lanes`).
3. A worker with room for it is found (`placement`).
4. The batch goes now or waits for company (`forming`).
5. It is filled up to its limits (`filling`).

What answers will need is learned (`lengths`), so is what workers get through (`rates`), and which batches are out
(`concurrency`).

Cost: with n tasks that wait, t tenants, w workers and b length buckets that are not empty (one where padding is not
limited, else at most log(longest prompt) / log(bucket_ratio), whatever n is), `add`, `cancel`, `finish` and `requeue`
take O(log n + log t), `next_batch` O(w + b log t) and O(log n + log t) for every row. These are amortized: records of
tasks that stopped waiting stay in the heaps until they surface or are most of what is there.
"""

from batcher.core.queue.queue import Queue as Queue
