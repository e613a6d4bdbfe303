"""fleetrun: starts the workers of a job, on torch's elastic agent."""
