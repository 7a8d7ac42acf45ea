"""The operator's side: begin, keep, fail over, fail back, stop, and what that leaves."""
