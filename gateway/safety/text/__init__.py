"""Text before any rule looks at it: the model's view, the view for detection, and the ways back to the original
offsets.
"""
