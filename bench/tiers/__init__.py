"""How the shipped tiers were trained and measured (docs/concepts/tiers.md); no process of a mesh needs it."""
