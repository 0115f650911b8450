"""Small tools that know nothing of models: formats of numbers, what allocates, pauses of the collector."""
