"""The planner of pipelines: segments, cuts into stages, schedules, meshes."""
