"""A remote host: the methods of `Host`, called over one connection to `vmckpt serve`."""
