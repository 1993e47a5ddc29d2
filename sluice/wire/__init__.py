"""The wires between the processes: names of subjects, and how messages are packed."""
