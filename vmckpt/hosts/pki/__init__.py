"""Who is who between hosts: a certificate authority, and the certificates of hosts."""
