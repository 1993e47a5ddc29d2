"""Work sent through the mesh: tasks of callers, of guard models and of shadows, and the NATS client."""
