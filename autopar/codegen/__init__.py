"""From a plan to the graphs that each rank runs, checked and printed as code."""
