"""Pictures and tables, drawn from saved results."""
