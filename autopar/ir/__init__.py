"""Hold what passes and the planner both read: the mesh, layouts, metadata of graphs, where ops are placed."""
