"""Generated code of what crosses the inner wires."""
