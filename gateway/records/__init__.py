"""Records for `Explain`, the audit, and outcomes for learning; stored in JetStream without delaying answers."""
