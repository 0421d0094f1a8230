"""What learns: backbones, heads, and the classifier they form."""
