"""A root made from a root: other storage, fewer towers, or further text towers. No picture is decoded again.

Inside: what one encoding can become of another, one tar's parts, all of them.
In: a committed root, and the encoding that the new one is to have.
Out: a root as stage 1 would have made it.
"""
