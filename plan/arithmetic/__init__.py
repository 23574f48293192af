"""The planner's arithmetic: FLOPs, scaling, costs and restarts."""
