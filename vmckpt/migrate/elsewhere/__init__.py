"""Migrations that another machine carries out, watched from here."""
