"""Task vectors: what a model learned as a difference of parameters, and algebra on it."""
