"""``sbpflow report``: a page of charts for one or more runs."""
