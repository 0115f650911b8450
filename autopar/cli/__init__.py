"""The commands of `autopar`, one a file: `add(subparsers)` declares it, `run(args)` does it and returns the exit
code."""
