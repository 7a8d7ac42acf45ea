"""What is known of VMs, migrations and replications, as Prometheus metrics."""
