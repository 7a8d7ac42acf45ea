"""Who has the guest: the journal, the decision, and what is done until one place has it."""
