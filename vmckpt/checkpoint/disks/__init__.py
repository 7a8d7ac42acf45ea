"""The disks of checkpoints: mounted, served, exported."""
