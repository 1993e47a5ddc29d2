"""Starts and supervises the processes of a mesh on this machine."""
