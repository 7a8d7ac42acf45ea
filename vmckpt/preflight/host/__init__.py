"""What a host is checked for, and the lines of shell that mend it."""
