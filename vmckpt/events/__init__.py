"""Events of a running operation, and the record it leaves."""
