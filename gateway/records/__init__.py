"""What is kept of requests: a record for `Explain`, an entry for the audit. Never on the way of an answer."""
