"""A blind study: raters say which of two pictures is better, and the analysis says how sure that is.

Inside: the protocol, each rater's order, the votes, the server and its page, statistics, the result.
In: sample sets of two or more models; invitations; votes.
Out: protocol.json, votes.sqlite, results.json, results.html, results.png. `python -m evaluation.study prepare`
"""
