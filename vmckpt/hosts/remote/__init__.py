"""A host somewhere else: the questions of `Host`, asked over one connection to `vmckpt serve`."""
