"""Where the VMs of a host go, in what order, and how long it takes. Pure."""
