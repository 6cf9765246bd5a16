"""Is an idea better than what there is, and is that more than noise?

In: two configs. Out: runs of both over seeds, a table, a picture.
"""
