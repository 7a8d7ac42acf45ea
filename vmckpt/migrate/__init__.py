"""Moving a running VM to another host: it runs in exactly one place, whatever happens."""
