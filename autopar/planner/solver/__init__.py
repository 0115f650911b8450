"""The search for the cheapest choice, with bounds."""
