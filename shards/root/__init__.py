"""A latents root on a `Store`: shared files, part writing, commits, indexes, and sample-by-sample reading."""
