"""VM specs: parsed and written."""
