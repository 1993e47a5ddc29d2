"""Text normalization: the text for the model, the text for detection, and maps to the original offsets."""
