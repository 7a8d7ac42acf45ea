"""What a copy of an adopted machine has of its own, in its arguments."""
