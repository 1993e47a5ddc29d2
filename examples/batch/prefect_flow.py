"""Prefect: a flow that runs a job and returns how many items it answered.

The key makes a retried task continue its job instead of beginning a new one.
"""

import sys

from prefect import flow, task

from sluice.client import Client
from sluice.v1 import jobs_pb2 as pb


@task(retries=3, retry_delay_seconds=60)
def answer(source: str, key: str) -> int:
    """Run the prompts at a URL that the operator lists; return the number of answers."""
    with Client() as client:
        spec = pb.JobSpec(name=key, model="small", input=pb.JobInput(url=source))
        job = client.jobs.create(spec, key)
        for now in client.jobs.watch(job.id, until_paused=True):
            job = now
    if job.state != pb.JOB_STATE_COMPLETED:
        raise RuntimeError(f"{job.id}: {job.reason}")
    return job.progress.succeeded


@flow(name="nightly-answers")
def nightly(source: str, key: str) -> int:
    """One job."""
    return answer(source, key)


if __name__ == "__main__":
    print(nightly(*sys.argv[1:]))
