"""Creates a page of charts for one or more runs (``sbpflow report``)."""
