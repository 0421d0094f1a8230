"""What a process needs while it works: threads, device, stop requests, progress bars, logs."""
