"""The parts of an adopted machine's arguments that are unique to each copy."""
