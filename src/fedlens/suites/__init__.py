"""Many runs: the cells of a suite, their cost, and how they are carried out."""
