"""What the records of many runs say: methods, comparisons, tables, statistics, words."""
