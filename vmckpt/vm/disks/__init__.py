"""Images on a host: what they are based on, and what uses them."""
