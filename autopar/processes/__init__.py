"""Let all ranks act together: groups, agreement on errors and values, a watch over those that are missing."""
