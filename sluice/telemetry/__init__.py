"""Names and set-up of traces; both are interfaces between the processes."""
