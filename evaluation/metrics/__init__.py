"""Features to numbers with their intervals; arithmetic, without pictures or networks.

Inside: the jackknife over groups, Fréchet distances, kernel distances, precision and recall, scores, a metric's id.
In: (N, D) features of samples and of a reference, and which sample is of which prompt.
Out: estimates: value, 95 % interval, what is estimated, N.
"""
