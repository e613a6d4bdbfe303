"""Measurements: each writes its raw figures as JSON; tables and pictures are made from those files."""
