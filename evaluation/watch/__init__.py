"""Follow a training run: evaluate each new checkpoint on other machines, and log the results to the run's tracker."""
