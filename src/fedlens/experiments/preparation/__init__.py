"""What a run needs before its first step: data, head, masks, cached activations, provenance."""
