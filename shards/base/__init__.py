"""What everything stands on.

Inside: errors, configs, tables as text, stop signals, durable files, stores (a folder or an object store).
In: paths, addresses, YAML and option words.
Out: objects that the rest is given.
"""
