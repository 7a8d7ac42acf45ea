"""Notifications of events, delivered to a command and a web server."""
