"""The plan: what it says, as text and as a file, checked, and compared with others."""
