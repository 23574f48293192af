"""Stage 1 for one tar: decode, batch, encode, write and commit. `encode_tar` in tar.py shows the whole sequence."""
