"""The canonical ops, `autopar::*`: what models are written in after capture, each with a rule that shards it."""
