"""Airflow: a nightly job over the files of the day.

When the task is retried, the same key continues the same job at the item where it was.
"""

from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

with DAG(
    dag_id="nightly_answers",
    schedule="0 2 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    default_args={"retries": 3, "retry_delay": timedelta(minutes=5)},
):
    BashOperator(
        task_id="answers",
        bash_command=(
            "sluice batch submit s3://prompts/{{ ds }}.jsonl --key nightly-{{ ds }}"
            " --model small --deadline 14400 --out /data/answers-{{ ds }}.jsonl --watch"
        ),
        env={"SLUICE_ADDRESS": "gateway:50051"},
        append_env=True,
        execution_timeout=timedelta(hours=5),
    )
