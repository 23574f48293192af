"""Selected rows → webdataset tars of original bytes.

Inside: the plan of tars, img2dataset with a careful opener, a check of each tar against its own records.
In: parquet files of URLs and captions.
Out: tars with img2dataset's side files, and a report of what failed and why.
"""
