"""What the server does with client updates: combine them, step, remember, average."""
