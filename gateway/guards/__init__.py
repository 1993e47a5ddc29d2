"""Guard models at the rim: their rows are sent through the mesh like any other, and their outcomes steer a stream."""
