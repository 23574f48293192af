"""The demo: a small picture world of one coloured shape per picture. `make demo`

Inside: the world, its captions, a web server, its small encoders, a judge, and the report.
In: a seed.
Out: runs/demo: tars, latents, two trained phases, samples, report.html.
"""
