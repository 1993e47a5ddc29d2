"""Store request records, audit entries and outcomes for learning in JetStream, without delaying answers."""
