"""Guard models: what they are asked, how verdicts are read, what follows. Plain code; rows are sent elsewhere."""
