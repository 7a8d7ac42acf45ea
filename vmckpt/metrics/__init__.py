"""Prometheus metrics of VMs, migrations, replications and schedules."""
