"""What users call: arguments are read and checked here, and handed to the compiler."""
