"""What may be chosen: strategies of every op, and what the user forbids, pins or asks for."""
