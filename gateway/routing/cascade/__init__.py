"""A cheap model's answer under watch, and its going over to a better model."""
