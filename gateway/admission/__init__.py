"""Admission: from an arriving call to a task that may be sent."""
