"""``sbpflow report``: the page of charts of one or several runs."""
