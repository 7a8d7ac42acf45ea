"""Schedules: periodic checkpoints, and their copies to other stores."""
