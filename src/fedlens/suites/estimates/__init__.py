"""What the runs of a suite cost: their work, speeds, memory, here and on other machines."""
