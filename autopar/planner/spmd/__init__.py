"""Plan one graph on one mesh, where every device runs the same program."""
