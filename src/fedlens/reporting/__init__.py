"""Records → what people read. Imports no torch."""
