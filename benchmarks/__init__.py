"""Reproducible measurements. Compare only ratios within one run, because machines differ."""
