"""Turn a plan into the graphs that each rank runs, checked and printed as code."""
