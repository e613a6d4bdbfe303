"""`fleetx train`: a small job that shows what FleetX does, and checks it while it runs.

`command` is the launcher's side: options, folder, workers. `job` is what each worker does: the run with FleetX, the
checks of `checks`, then the plain runs and the comparison. Start reading with `job.work`.
"""
