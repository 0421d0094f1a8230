"""What is kept on disk: run folders, records, checkpoints, manifests, trackers."""
