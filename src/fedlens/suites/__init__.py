"""Many runs: what a suite consists of, what it costs, who carries it out."""
