"""The joint graph of all devices as the graphs of one rank."""
