"""Who has the guest: the journal, the decision, and recovery until exactly one host has it."""
