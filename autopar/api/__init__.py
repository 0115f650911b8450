"""Read and check the arguments of what users call, and hand them to the compiler."""
