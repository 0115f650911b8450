"""All ranks in one process, and what they compute against one device."""
