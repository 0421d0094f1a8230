"""What is asked of a finished run: scaling, merging, client algebra, interference."""
