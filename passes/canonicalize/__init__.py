"""An exported forward, and the joint graph, in canonical ops."""
