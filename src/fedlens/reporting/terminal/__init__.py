"""Tables of runs, suites and analyses for the terminal."""
