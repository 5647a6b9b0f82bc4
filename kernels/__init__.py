"""Pallas GPU kernels; imported as maxmeg.kernels."""
