"""Models: their weights, and how their attention reads the paged cache."""
