"""fleetrun: starts the workers of a job, watches them, restarts them, and says what went wrong."""
