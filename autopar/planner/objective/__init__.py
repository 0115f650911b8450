"""Price a choice: seconds, bytes over a step, what is recomputed."""
