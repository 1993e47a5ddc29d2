"""How the shipped tiers were trained and measured (docs/tiers.md); no process of a mesh needs it."""
