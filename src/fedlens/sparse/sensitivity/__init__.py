"""How sensitive a loss is to each weight: squared gradients of single examples, summed."""
