"""Services of a running process: threads, device, stop requests, progress bars, logs."""
