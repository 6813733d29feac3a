"""The one algorithm: validation, plan, tile, and the schedules that run it."""
