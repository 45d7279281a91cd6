"""The only rooms that know argparse, signals and run directories: what `gtp-jax` runs."""
