"""The jobs service: offline jobs of many items, each answered exactly once.

`scheduler` claims jobs, `runner` runs one of them, `stage_attempt` sends the items of a stage and
`stage_log` writes their outcomes; `service` is the API. Everything that must outlive a process is
in `store`.
"""
