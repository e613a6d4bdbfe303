"""Which worker failed or stands still, and why: used by fleetrun, and by the workers of other launchers.

Start reading in `ending`: what is known of a worker's end, and which of several was the cause. May import `comm`.
"""
