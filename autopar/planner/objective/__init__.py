"""What a choice costs: seconds, bytes over a step, what is computed again."""
