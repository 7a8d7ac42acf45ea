"""The hook for NVIDIA GPUs; main.py says how it runs."""
