"""What is learned from: images, their splits, batches and cached features."""
