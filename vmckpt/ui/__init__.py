"""What a person sees: events as a live display or as plain lines, results as text."""
