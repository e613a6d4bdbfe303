"""The planner measured: predictions beside real steps, and its choice beside plans made by hand."""
