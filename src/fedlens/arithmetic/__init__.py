"""Task vectors: differences of parameters that encode what a model learned, and their algebra."""
