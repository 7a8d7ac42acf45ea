"""Output for people: live progress or plain lines; results as text."""
