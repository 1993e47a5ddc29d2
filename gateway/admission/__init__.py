"""From a valid request to a task that may be sent: safety, routing, tokenization, overload control, usage."""
