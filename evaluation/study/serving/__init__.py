"""The page that raters see, and the one process that serves it.

Inside: the page's three files, the server, limits of its rates.
In: a prepared study, invitation links. Out: votes.
"""
