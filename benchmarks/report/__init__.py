"""Tables and pictures of README and docs, made from saved results."""
