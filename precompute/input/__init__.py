"""Reading samples from webdataset tars, and detecting damage to them."""
