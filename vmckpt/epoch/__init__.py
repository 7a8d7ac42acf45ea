"""The epoch: a running VM's state, captured from outside a few times a second."""
