"""The first minutes of a GPU: is what it computes right, how fast is it, and where does its time go?

Inside: the parts of the check, each run in a process of its own; what they found; the page.
In: the product's own step and encoders, on random numbers.
Out: one JSON that a plan reads, and a page. `python -m bench.gpu_check --output runs/gpu-check`
"""
