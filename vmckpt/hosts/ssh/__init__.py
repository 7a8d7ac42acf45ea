"""SSH connections to hosts: the only package that imports paramiko."""
