"""Reproducible measurements; ratios within one run count, for machines differ."""
