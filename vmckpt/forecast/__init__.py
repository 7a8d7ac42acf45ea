"""Forecasts: how long a migration will take, from measurements and past migrations."""
