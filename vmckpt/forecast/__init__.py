"""Forecasts: how long a migration will take, from what is measured and what was learned."""
